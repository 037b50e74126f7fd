"""Length policies on completed chains: pure functions from confidences and verdicts to chain lengths.

Called by ``simulate``.  Ours are floors, as the decoder applies them (``drafting.policy``); beside them stand what
others do and what nobody can do, the oracle.  Nothing here reads records or learns from what it has not been handed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.calibration.temperature import calibrated_confidences
from adaptive_spec.core import Scaling, StepCost

FIRST_THRESHOLD = 0.4  # transformers' assistant_confidence_threshold before it has seen anything
_ENOUGH = 5  # tokens; with no more of them transformers keeps the threshold that it has
_MISSED = 3.0  # a stop before a token that would have been kept weighs so much more than a token drafted in vain
_ROUNDS = 50
_SETTLED = 1e-12


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens that each step drafts, and how many of them it has verified.

    cut: would have drafted on, but the completed chain ends there.  [steps] each.
    """

    drafted: NDArray[np.int64]
    verified: NDArray[np.int64]
    cut: NDArray[np.bool_]

    @classmethod
    def of(cls, lengths: NDArray[np.int64], cut: NDArray[np.bool_] | None = None) -> "Choice":
        """All that is drafted is verified."""
        return cls(lengths, lengths, np.zeros(len(lengths), np.bool_) if cut is None else cut)


def seconds_by_length(cost: StepCost) -> NDArray[np.float64]:
    """Seconds of a step that drafts and verifies 0, 1, 2 … tokens.  [lengths]"""
    verify = np.asarray(cost.verify_seconds, np.float64)
    return np.asarray(verify + cost.draft_seconds * np.arange(len(verify)))


def fixed(num_steps: int, length: int) -> Choice:
    """Always the same; 0 is no speculation."""
    return Choice.of(np.full(num_steps, length, np.int64))


def by_floors(
    confidence: NDArray[np.float64],
    scaling: Scaling,
    floors: Sequence[float],
    request_temperature: NDArray[np.float64] | float = 0.0,
) -> Choice:
    """Draw token i while the product of calibrated confidences before it is at least floor i, as the decoder does.

    Args:
        confidence: [steps, longest], uncalibrated.
        floors: of ``drafting.policy``.
        request_temperature: [steps]; 0 is greedy.
    """
    num_steps, longest = confidence.shape
    reach = np.cumprod(calibrated_confidences(confidence, scaling, np.reshape(request_temperature, (-1, 1))), axis=1)
    before = np.concatenate([np.ones((num_steps, 1)), reach], axis=1)[:, : len(floors)]
    goes_on = before >= np.asarray(floors[: longest + 1], np.float64)
    wanted = np.cumprod(goes_on, axis=1).sum(axis=1)
    return Choice.of(np.asarray(np.minimum(wanted, longest), np.int64), wanted > longest)


def oracle(num_acceptable: NDArray[np.int64], cost: StepCost) -> Choice:
    """The largest goodput there is: each step knows how many tokens the target would keep, and drafts only if it pays.

    Time is worth the goodput reached; lengths and goodput are found in turns (Dinkelbach 1967).

    Args:
        num_acceptable: [steps], of the longest chain.
    """
    seconds = seconds_by_length(cost)[: int(num_acceptable.max(initial=0)) + 1]
    emitted = 1.0 + np.arange(len(seconds))
    rate = float(emitted[0] / seconds[0])
    for _ in range(_ROUNDS):
        worth = emitted - rate * seconds
        best = np.array([worth[: most + 1].argmax() for most in range(len(worth))])
        lengths = best[num_acceptable]
        reached = float(emitted[lengths].sum() / seconds[lengths].sum())
        if reached <= rate * (1 + _SETTLED):
            break
        rate = reached
    return Choice.of(np.asarray(lengths, np.int64))


@dataclass(slots=True)
class RocThreshold:
    """transformers' threshold within one call, and the tokens judged so far: their probabilities, and who was kept."""

    threshold: float = FIRST_THRESHOLD
    seen: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)

    def judge(self, confidence: Sequence[float], num_accepted: int) -> None:
        """Count a drafted chain, of which so many tokens were kept, and move the threshold."""
        judged = min(num_accepted + 1, len(confidence))
        self.seen += confidence[:judged]
        self.kept += [place < num_accepted for place in range(judged)]
        self.threshold = roc_threshold(self.seen, self.kept, self.threshold)


def transformers_rule(
    confidence: NDArray[np.float64], accepted: NDArray[np.bool_], request_index: NDArray[np.int64]
) -> Choice:
    """The dynamic threshold of assisted generation in transformers 5.24, which forgets at the end of each call.

    A chain goes on until a token's own probability is below the threshold; that token is still in it.  After each step
    the tokens judged so far, kept ones and the first refused of each chain, give the next threshold
    (``roc_threshold``).  A call serves one request, so each begins at ``FIRST_THRESHOLD`` with nothing seen.
    transformers drafts 20 tokens at most, here it is ``longest``.

    Args:
        confidence, accepted: [steps, longest].  request_index: [steps], steps in the order in which they were decoded.
    """
    num_acceptable = np.cumprod(accepted, axis=1).sum(axis=1)
    longest = confidence.shape[1]
    lengths = np.zeros(len(confidence), np.int64)
    cut = np.zeros(len(confidence), np.bool_)
    for request in np.unique(request_index):
        rule = RocThreshold()
        for step in np.flatnonzero(request_index == request):
            below = np.flatnonzero(confidence[step] < rule.threshold)
            length = int(below[0]) + 1 if len(below) else longest
            rule.judge(confidence[step, :length].tolist(), min(length, int(num_acceptable[step])))
            lengths[step], cut[step] = length, not len(below)
    return Choice.of(lengths, cut)


def roc_threshold(seen: Sequence[float], kept: Sequence[bool], now: float) -> float:
    """The probability with the smallest FPR + 3 FNR on the tokens judged so far; ties go to the higher.

    FPR: share of the refused tokens that are at least as probable, drafted in vain.  FNR: share of the kept ones that
    are less probable, missed.  ``now`` is returned while there are too few tokens or all of one kind.
    """
    probs, kept_array = np.asarray(seen, np.float64), np.asarray(kept, np.bool_)
    if len(probs) <= _ENOUGH or kept_array.all() or not kept_array.any():
        return now
    order = np.argsort(-probs, kind="stable")
    probs, kept_array = probs[order], kept_array[order]
    last = np.append(np.flatnonzero(np.diff(probs)), len(probs) - 1)  # of each distinct probability
    hits = np.cumsum(kept_array)[last]
    false_alarms = last + 1 - hits
    costs = false_alarms / false_alarms[-1] + _MISSED * (1 - hits / hits[-1])
    return float(probs[last[costs.argmin()]])
