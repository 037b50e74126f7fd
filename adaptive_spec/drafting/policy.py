"""The length policy: before each further draft token, go on or stop.

Lossless for any rule of this kind: it looks at distributions and drawn tokens, but a token once drawn is always
verified, so each drawn token still meets rejection sampling against the distribution it was drawn from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from adaptive_spec.core import StepCost, Thresholds

_EDGE = 1e-6


def calibrated_confidence(confidence: float, temperature: float) -> float:
    """Probability of acceptance read off the draft's top probability: sigmoid(logit(confidence) / temperature)."""
    if temperature == 1:
        return confidence
    clipped = min(max(confidence, _EDGE), 1 - _EDGE)
    return 1 / (1 + math.exp(-math.log(clipped / (1 - clipped)) / temperature))


@dataclass(slots=True)
class ChainBudget:
    """How long one row's chain may become in this step, updated after each drawn token."""

    limit: int
    stop_below: float
    temperature: float
    survival: float = 1.0
    drawn: int = 0

    @property
    def wants_more(self) -> bool:
        return self.drawn < self.limit and self.survival >= self.stop_below

    def drew(self, confidence: float) -> None:
        """Account for a drawn token whose distribution had this top probability."""
        self.drawn += 1
        self.survival *= calibrated_confidence(confidence, self.temperature)


def chain_budget(
    thresholds: Thresholds, *, fixed: int | None, explore: bool, maximum: int, tokens_left: int
) -> ChainBudget:
    """Return the budget of one step: the request's fixed length, else exploring at full length, else the thresholds.

    A step always emits one token beyond the chain, so a chain longer than ``tokens_left - 1`` would be thrown away.
    """
    room = max(0, tokens_left - 1)
    if fixed is not None:
        return ChainBudget(min(fixed, maximum, room), 0.0, thresholds.temperature)
    if explore:
        return ChainBudget(min(maximum, room), 0.0, thresholds.temperature)
    limit = min(thresholds.max_chain_length, maximum, room)
    return ChainBudget(limit, thresholds.stop_below, thresholds.temperature)


def best_length(survival: Sequence[float], cost: StepCost | None, draft_seconds: float = 0.0) -> int:
    """Return the chain length with the largest expected goodput; ties go to the shorter.

    Maximises (1 + sum over i <= n of survival_1 … survival_i) / (n draft_seconds + verify_seconds[n]).

    Args:
        survival: P(position accepted | reached), one per token that could be proposed.
        cost: of this machine; None, not measured: the whole chain.
        draft_seconds: per proposed token; 0 for an n-gram chain.
    """
    if cost is None:
        return len(survival)
    best, best_goodput, emitted, reach = 0, 1 / cost.verify_seconds[0], 1.0, 1.0
    for length, share in enumerate(survival[: len(cost.verify_seconds) - 1], start=1):
        reach *= share
        emitted += reach
        goodput = emitted / (length * draft_seconds + cost.verify_seconds[length])
        if goodput > best_goodput:
            best, best_goodput = length, goodput
    return best
