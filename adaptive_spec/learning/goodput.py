"""What held-out requests would have cost: recorded text decoded once more on paper, under a release's thresholds.

A greedy replay knows where every step begins and how many tokens it keeps; the thresholds, with the draft's recorded
confidences, say how many it drafts, and the measured cost what that takes.  Called by the pipeline for the gate.  What
a draft would go on to say after a token that the target refuses is not on record: how sure it is of the recorded text
there stands for it, for both releases alike.

Nothing is judged on the requests that taught it: the thresholds for each are learnt from those of other folds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.calibration.temperature import calibrated_confidences
from adaptive_spec.core import POOLED, StepCost, Thresholds
from adaptive_spec.drafting.policy import stopping_floors, threshold_floors
from adaptive_spec.drafting.survival import SurvivalCounter
from adaptive_spec.learning.evaluate import replay
from adaptive_spec.records.observations import Observations
from adaptive_spec.releases.gate import Served
from adaptive_spec.releases.paired import TraceScore
from adaptive_spec.settings import DecoderSettings

FOLDS = 4
_BINS = 10

Table = Mapping[str, Thresholds]  # by domain


def serve(
    scores: Sequence[TraceScore], learn: Callable[[int], Table], cost: StepCost, settings: DecoderSettings
) -> list[Served]:
    """Decode held-out requests on paper, each alone in its batch.

    Args:
        scores: with their positions.
        learn: the thresholds of a release, by domain, as all requests but those of a fold teach them; a release that
            learns nothing here has the same for every fold.  See ``without_fold``.
        cost: of a step of one row.
    """
    longest = min(settings.max_chain_length, len(cost.verify_seconds) - 1)
    numbers = {(fold, domain): found for fold in range(FOLDS) for domain, found in _told(scores, fold, learn, longest)}
    return [
        served(score, numbers[place % FOLDS, score.domain], cost, longest, settings.policy)
        for place, score in enumerate(scores)
    ]


def served(
    score: TraceScore, thresholds: Thresholds, cost: StepCost, longest: int, policy: str, chain_length: int = 4
) -> Served:
    """Decode one.

    Args:
        longest: chain that may be drafted.
        policy: of the decoder, stopping | threshold.
        chain_length: of the full chains behind ``num_steps``.
    """
    calibrated = calibrated_confidences(np.asarray(score.confidence, np.float64), thresholds.scaling)
    gaps, num_reached = _gaps(score.agrees, calibrated, longest)
    return Served(
        domain=score.domain,
        request_id=score.request_id,
        num_tokens=len(score.agrees),
        num_steps=sum(1 for _ in replay(score.agrees, chain_length)),
        seconds=_seconds(score.agrees, calibrated, thresholds, cost, longest, policy),
        num_agreeing=sum(score.agrees),
        gaps=gaps,
        num_reached=num_reached,
        loops=score.loops,
    )


def without_fold(observations: Mapping[str, Observations], fold: int) -> dict[str, Observations]:
    """What the requests of all other folds have shown, by domain; ``request_index`` counts the requests."""
    others = {domain: seen.only(seen.request_index % FOLDS != fold) for domain, seen in observations.items()}
    return {domain: seen for domain, seen in others.items() if len(seen.position)}


def _told(
    scores: Sequence[TraceScore], fold: int, learn: Callable[[int], Table], longest: int
) -> Iterator[tuple[str, Thresholds]]:
    """What a decoder goes by in each domain: the thresholds, and survival as counted where they tell none.

    A release that was never calibrated, such as the untouched draft, tells none; its decoder counts while it serves.
    """
    table = learn(fold)
    others = [score for place, score in enumerate(scores) if place % FOLDS != fold]
    for domain in sorted({score.domain for score in scores}):
        thresholds = table.get(domain) or table.get(POOLED) or Thresholds()
        if not thresholds.survival and longest:
            own = [score for score in others if score.domain == domain]
            thresholds = replace(thresholds, survival=_counted(own, longest) or _counted(others, longest))
        yield domain, thresholds


def _counted(scores: Sequence[TraceScore], longest: int) -> tuple[float, ...]:
    counter = SurvivalCounter()
    for score in scores:
        for start, accepted in replay(score.agrees, longest):
            counter.add(min(longest, len(score.agrees) - start), accepted)
    return counter.curve()


def _seconds(
    agrees: Sequence[bool],
    calibrated: NDArray[np.float64],
    thresholds: Thresholds,
    cost: StepCost,
    longest: int,
    policy: str,
) -> float:
    position, seconds = 0, 0.0
    while position < len(agrees):
        room = min(longest, len(agrees) - position - 1)  # the step's own token needs no draft
        length = _length(calibrated[position : position + room], _floors(thresholds, cost, room, policy))
        accepted = 0
        while accepted < length and agrees[position + accepted]:
            accepted += 1
        seconds += length * cost.draft_seconds + cost.verify_seconds[length]
        position += accepted + 1
    return seconds


def _floors(thresholds: Thresholds, cost: StepCost, room: int, policy: str) -> tuple[float, ...]:
    if policy == "stopping" and thresholds.survival:
        return stopping_floors(thresholds.survival, cost, room)
    return threshold_floors(thresholds.lengths_at(1), room)


def _length(calibrated: NDArray[np.float64], floors: Sequence[float]) -> int:
    reach = 1.0
    for drawn, floor in enumerate(floors):
        if reach < floor:
            return drawn
        reach *= float(calibrated[drawn])
    return len(floors)


def _gaps(agrees: Sequence[bool], calibrated: NDArray[np.float64], longest: int) -> tuple[NDArray[np.float64], int]:
    """Confidence less acceptance over the positions that full chains reach: [bins], and their number."""
    reached = [
        at
        for start, accepted in replay(agrees, longest)
        for at in range(start, min(start + accepted + 1, start + longest, len(agrees)))
    ]
    sure = calibrated[reached]
    place = np.minimum((sure * _BINS).astype(np.int64), _BINS - 1)
    gap = sure - np.asarray(agrees, np.float64)[reached]
    return np.asarray(np.bincount(place, weights=gap, minlength=_BINS), np.float64), len(reached)
