"""The length policies: before each further draft token, go on or stop.

A policy is a list of floors: token number i is drawn while the reach so far, the product of the calibrated confidences
of the tokens before it, is at least floor i.  A request's fixed length, a threshold and optimal stopping differ in
their floors only, so a decoder compares tensors, on any device, and never asks who chose the numbers.

Lossless for any floors: they look at distributions and drawn tokens, but a token once drawn is always verified, so each
drawn token still meets rejection sampling against the distribution it was drawn from.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from adaptive_spec.core import LengthRule, StepCost

_EDGE = 1e-6
NEVER = math.inf


def calibrated_confidence(confidence: Tensor, temperature: Tensor, offset: Tensor) -> Tensor:
    """Probability of acceptance read off the draft's top probability, as ``core.Scaling`` says.

    confidence, temperature, offset: [rows] -> [rows]
    """
    clipped = confidence.clamp(_EDGE, 1 - _EDGE)
    untouched = (temperature == 1) & (offset == 0)
    return torch.where(untouched, confidence, (clipped.logit() / temperature + offset).sigmoid())


def fixed_floors(length: int) -> tuple[float, ...]:
    """Exactly ``length`` tokens."""
    return (0.0,) * length


def threshold_floors(rule: LengthRule, longest: int) -> tuple[float, ...]:
    """At least one token, then on while the reach is at least the threshold (SpecDec++, arXiv 2405.19715)."""
    length = min(rule.max_chain_length, longest)
    return tuple(0.0 if index == 0 else rule.stop_below for index in range(length))


@lru_cache(maxsize=4096)  # asked for every row of every step, answered anew when counts or rows change
def stopping_floors(survival: tuple[float, ...], cost: StepCost, longest: int) -> tuple[float, ...]:
    """Optimal stopping: draw the next token while some longer chain is worth its time.

    Time is worth ``rate``, the goodput of the best fixed length on this curve.  With i tokens drawn at reach r, going
    on to n gains r (s_i+1 + s_i+1 s_i+2 + … + s_i+1 … s_n) tokens and costs rate x (draft and verification seconds of n
    beyond those of i).  Both are linear in r, so the rule "some n gains more than it costs" is a floor on r, found for
    every i in one pass.  Length 0 results when no n pays at reach 1.

    Args:
        survival: P(position accepted | reached), of the domain.
        cost: of a step of the present batch on this machine.
    """
    longest = min(longest, len(survival), len(cost.verify_seconds) - 1)
    draft = cost.draft_seconds
    length = best_length(list(accumulate(survival[:longest], mul)), cost, draft)
    rate = (1 + _gain(survival, 0, length)) / (length * draft + cost.verify_seconds[length])
    floors = []
    for drawn in range(longest):
        ratios = []
        for n in range(drawn + 1, longest + 1):
            seconds = (n - drawn) * draft + cost.verify_seconds[n] - cost.verify_seconds[drawn]
            gain = _gain(survival, drawn, n)
            ratios.append(rate * seconds / gain if gain > 0 else NEVER)
        floors.append(min(ratios))
    return tuple(floors)


def _gain(survival: Sequence[float], start: int, stop: int) -> float:
    """Expected tokens of positions start … stop - 1, given that start is reached."""
    total, reach = 0.0, 1.0
    for share in survival[start:stop]:
        reach *= share
        total += reach
    return total


def best_length(gains: Sequence[float], cost: StepCost | None, draft_seconds: float = 0.0, rows: int = 1) -> int:
    """Return the chain length with the largest expected goodput of a step; ties go to the shorter.

    Maximises (rows + sum over i <= n of gains_i) / (n draft_seconds + verify_seconds[n]).

    Args:
        gains: expected accepted tokens of each position, summed over the rows.
        cost: of a step of so many rows on this machine; None, not measured: the whole chain.
        draft_seconds: per proposed token; 0 for an n-gram chain.
    """
    if cost is None:
        return len(gains)
    best, best_goodput, emitted = 0, rows / cost.verify_seconds[0], float(rows)
    for length, gain in enumerate(gains[: len(cost.verify_seconds) - 1], start=1):
        emitted += gain
        goodput = emitted / (length * draft_seconds + cost.verify_seconds[length])
        if goodput > best_goodput:
            best, best_goodput = length, goodput
    return best
