"""Choose when to stop drafting: the thresholds with the largest predicted goodput, speculation off included.

The recorded steps are replayed under every candidate policy.  The policy drafts one token, and another while the
product of calibrated confidences is at least ``stop_below`` and the chain is shorter than ``max_chain_length``; a
threshold policy is optimal (SpecDec++, arXiv 2405.19715).  Goodput is mean emitted tokens over mean cost, a ratio of
means as in a renewal process; that steps would begin elsewhere in the text under another policy is ignored.  A step of
several rows costs what its longest chain costs; its other rows are taken to be of the same domain.

Records are censored twice, and ``Replay`` completes them:

- after a rejection the verdict is known but not how far the policy would have drafted, so confidences are filled in;
- where the live policy stopped, both the next confidence and its verdict are filled in.

What is filled in comes from real steps that did reach the position after a similar product of confidences, drawn from
explored steps alone where there are enough of them: the policy stops on confidences only, so given these its stopping
says nothing about the verdict.  All steps are replayed; there is no inverse-propensity weighting, because steps do not
record the thresholds that they ran under.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.calibration.temperature import calibrated_confidences
from adaptive_spec.core import LengthRule, Scaling, StepCost, Thresholds
from adaptive_spec.errors import NotEnoughDataError
from adaptive_spec.records.observations import Observations

STOP_BELOW_GRID = (0.0, 0.02, *(round(0.05 * step, 2) for step in range(1, 20)))
MIN_REACHED = 10  # positions that fewer steps have reached are no candidates; with fewer steps nothing is chosen
_NEIGHBOURS = 8  # on each side, among which a donor is drawn
_BOOTSTRAPS = 400


@dataclass(frozen=True, slots=True)
class PolicyGoodput:
    """What one policy would have done: means per row and step, and emitted tokens per second of all rows."""

    stop_below: float
    max_chain_length: int
    emitted_tokens: float
    drafted_tokens: float
    goodput: float
    rows: int = 1


@dataclass(frozen=True, slots=True)
class ThresholdReport:
    """How thresholds were chosen.

    low, high: 95 % bootstrap interval, over requests, of the chosen goodput.  curve: the best policy of each length.
    grid: goodput of every longest chain, from 0, at every threshold of ``STOP_BELOW_GRID``.  larger_batches,
    larger_baselines: the choice, and no speculation, in batches of more rows.
    """

    chosen: PolicyGoodput
    baseline: PolicyGoodput  # no speculation
    low: float
    high: float
    curve: tuple[PolicyGoodput, ...]
    grid: tuple[tuple[float, ...], ...]
    larger_batches: tuple[PolicyGoodput, ...]
    larger_baselines: tuple[PolicyGoodput, ...]
    num_steps: int
    num_explored_steps: int
    cost_key: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found | {"stop_below_grid": list(STOP_BELOW_GRID)}


@dataclass(frozen=True, slots=True)
class Replay:
    """Recorded steps, completed to the full length.

    confidence, accepted: [steps, length], calibrated, and verdicts as had all tokens before been kept.
    cumulative: [steps, length] product of calibrated confidences up to and including each position.
    num_acceptable: [steps] tokens that the target would keep if all were drafted.  request_index: [steps].
    request_temperature: [steps], 0 is greedy.
    num_reached: [steps] positions on record, up to the length; what is beyond them was filled in.
    survival: P(accepted | reached) per position.
    """

    confidence: NDArray[np.float64]
    accepted: NDArray[np.bool_]
    cumulative: NDArray[np.float64]
    num_acceptable: NDArray[np.int64]
    request_index: NDArray[np.int64]
    request_temperature: NDArray[np.float64]
    num_reached: NDArray[np.int64]
    survival: tuple[float, ...]
    num_explored_steps: int

    @classmethod
    def complete(cls, observations: Observations, scaling: Scaling, max_chain_length: int, seed: int) -> "Replay":
        """Build it from observations whose rows are ordered by step, then position; position 0 begins a step.

        Raises:
            NotEnoughDataError: fewer than ``MIN_REACHED`` steps were observed.
            ValueError: the rows are not ordered.
        """
        position = np.asarray(observations.position, np.int64)
        begins = position == 0
        if begins.sum() < MIN_REACHED:
            raise NotEnoughDataError(
                f"Thresholds need {MIN_REACHED} speculative steps on record. Serve some traffic first."
            )
        if not begins[0] or not (begins[1:] | (np.diff(position) == 1)).all():
            raise ValueError("observations must be ordered by step, then position")
        step = np.cumsum(begins) - 1
        reached = np.bincount(step)
        explored = np.asarray(observations.explored, np.bool_)[begins]
        length = int(sum((reached > column).sum() >= MIN_REACHED for column in range(max_chain_length)))
        kept = position < length
        confidence = np.zeros((len(reached), length))
        accepted = np.zeros((len(reached), length), np.bool_)
        warmth = np.asarray(observations.request_temperature, np.float64)
        calibrated = calibrated_confidences(np.asarray(observations.confidence, np.float64), scaling, warmth)
        confidence[step[kept], position[kept]] = calibrated[kept]
        accepted[step[kept], position[kept]] = np.asarray(observations.accepted, np.bool_)[kept]
        survival = _fill(confidence, accepted, reached, explored, np.random.default_rng(seed))
        return cls(
            confidence=confidence,
            accepted=accepted,
            cumulative=np.asarray(np.cumprod(confidence, axis=1), np.float64),
            num_acceptable=np.cumprod(accepted, axis=1).sum(axis=1),
            request_index=np.asarray(observations.request_index, np.int64)[begins],
            request_temperature=warmth[begins],
            num_reached=np.minimum(reached, length),
            survival=survival,
            num_explored_steps=int(explored.sum()),
        )

    @property
    def max_chain_length(self) -> int:
        """The longest chain that enough steps reached."""
        return len(self.survival)

    def lengths(self, stop_below: float, max_chain_length: int) -> NDArray[np.int64]:
        """Return the chain length of each step under a policy.  [steps]"""
        longest = min(max_chain_length, self.max_chain_length)
        if longest == 0:
            return np.zeros(len(self.cumulative), np.int64)
        goes_on = self.cumulative[:, : longest - 1] >= stop_below  # products never grow, so these lead
        return np.asarray(1 + goes_on.sum(axis=1), np.int64)

    def goodput(self, cost: StepCost, stop_below: float, max_chain_length: int, rows: int = 1) -> PolicyGoodput:
        """Predict one policy.  cost: of a step of so many rows."""
        lengths = self.lengths(stop_below, max_chain_length)
        emitted = 1.0 + np.minimum(lengths, self.num_acceptable)
        shorter = np.cumsum(np.bincount(lengths, minlength=len(cost.verify_seconds))) / len(lengths)
        longest = np.diff(shorter**rows, prepend=0.0)  # P(the longest of so many chains has this length)
        seconds = float(longest @ (np.arange(len(longest)) * cost.draft_seconds + np.asarray(cost.verify_seconds)))
        goodput = rows * float(emitted.mean()) / seconds
        return PolicyGoodput(stop_below, max_chain_length, float(emitted.mean()), float(lengths.mean()), goodput, rows)

    def by_request(self, cost: StepCost, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """What chains of these lengths would have emitted, and the seconds, one row at a time.

        lengths: [steps] -> [2, requests]
        """
        emitted = 1.0 + np.minimum(lengths, self.num_acceptable)
        seconds = lengths * cost.draft_seconds + np.asarray(cost.verify_seconds)[lengths]
        request = np.unique(self.request_index, return_inverse=True)[1]
        return np.stack([np.bincount(request, weights=values) for values in (emitted, seconds)])


def goodput_interval(*by_request: NDArray[np.float64], seed: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of a goodput, or of the ratio of two, whole requests drawn.

    by_request: of the policy, and of what it is compared with, as ``Replay.by_request`` returns them.
    """
    num = by_request[0].shape[1]
    drawn = np.random.default_rng(seed).integers(0, num, (_BOOTSTRAPS, num))
    goodput, *others = (part[0, drawn].sum(axis=1) / part[1, drawn].sum(axis=1) for part in by_request)
    tail = (1 - confidence) / 2
    low, high = np.quantile(goodput / others[0] if others else goodput, [tail, 1 - tail])
    return float(low), float(high)


def choose_threshold(
    observations: Observations, scaling: Scaling, costs: Mapping[int, StepCost], max_chain_length: int, seed: int
) -> tuple[Thresholds, ThresholdReport]:
    """Return the thresholds with the largest predicted goodput; ties go to shorter chains, then lower thresholds.

    Args:
        costs: of a step, by its rows; one row is among them.
        max_chain_length: the decoder's limit; the cost's lengths and what was reached limit it further.

    Raises:
        NotEnoughDataError: fewer than ``MIN_REACHED`` steps were observed.
    """
    cost = costs[1]
    replay = Replay.complete(observations, scaling, min(max_chain_length, len(cost.verify_seconds) - 1), seed)
    table = _table(replay, cost)
    curve = tuple(max(points, key=lambda point: point.goodput) for points in table)
    chosen = max(curve, key=lambda point: point.goodput)
    lengths = replay.lengths(chosen.stop_below, chosen.max_chain_length)
    low, high = goodput_interval(replay.by_request(cost, lengths), seed=seed)
    larger = {rows: _table(replay, costs[rows], rows) for rows in sorted(costs) if rows > 1}
    batches = tuple(max((p for points in t for p in points), key=lambda p: p.goodput) for t in larger.values())
    thresholds = Thresholds(
        temperature=scaling.temperature,
        offset=scaling.offset,
        warmth=scaling.warmth,
        stop_below=chosen.stop_below,
        max_chain_length=chosen.max_chain_length,
        survival=replay.survival,
        num_observations=len(observations.position),
        larger_batches=tuple(map(_rule, batches)),
    )
    report = ThresholdReport(
        chosen=chosen,
        baseline=curve[0],
        low=low,
        high=high,
        curve=curve,
        grid=tuple(tuple(point.goodput for point in points) for points in table),
        larger_batches=batches,
        larger_baselines=tuple(points[0][0] for points in larger.values()),
        num_steps=len(replay.num_acceptable),
        num_explored_steps=replay.num_explored_steps,
        cost_key=cost.key,
    )
    return thresholds, report


def _table(replay: Replay, cost: StepCost, rows: int = 1) -> list[list[PolicyGoodput]]:
    """Every policy, by longest chain, from 0; where at most one token is drafted thresholds change nothing."""
    return [
        [replay.goodput(cost, stop, length, rows) for stop in (STOP_BELOW_GRID if length > 1 else (0.0,))]
        for length in range(replay.max_chain_length + 1)
    ]


def _rule(policy: PolicyGoodput) -> LengthRule:
    return LengthRule(policy.rows, policy.stop_below, policy.max_chain_length)


def _fill(
    confidence: NDArray[np.float64],
    accepted: NDArray[np.bool_],
    reached: NDArray[np.int64],
    explored: NDArray[np.bool_],
    random: np.random.Generator,
) -> tuple[float, ...]:
    """Complete both [steps, length] arrays in place; return the survival of the donors at each position.

    After a rejection verdicts are filled in too, harmlessly: only the leading run of acceptances counts.
    """
    survival = []
    product = np.ones(len(reached))
    for column in range(confidence.shape[1]):
        donors = np.flatnonzero((reached > column) & explored)
        if len(donors) < MIN_REACHED:
            donors = np.flatnonzero(reached > column)
        missing = np.flatnonzero(reached <= column)
        chosen = donors[_nearest(product[donors], product[missing], random)]
        confidence[missing, column] = confidence[chosen, column]
        accepted[missing, column] = accepted[chosen, column]
        survival.append(float(accepted[donors, column].mean()))
        product = product * confidence[:, column]
    return tuple(survival)


def _nearest(keys: NDArray[np.float64], wanted: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
    """For each wanted value draw one of the indices whose keys are nearest.  keys: [donors]; wanted: [n] -> [n]"""
    noise = 1e-9  # spreads ties over all donors that share them
    keys = keys + noise * random.random(len(keys))
    order = np.argsort(keys)
    centre = np.searchsorted(keys[order], wanted + noise * random.random(len(wanted)))
    offset = random.integers(-_NEIGHBOURS, _NEIGHBOURS, len(wanted))
    return np.asarray(order[np.clip(centre + offset, 0, len(keys) - 1)], np.int64)
