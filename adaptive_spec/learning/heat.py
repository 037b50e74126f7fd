"""The sampling temperature of a draft, per domain: what its logits are divided by before a token is drawn.

A sampled chain is accepted with probability sum of min(target, draft), so the best temperature maximises that sum.  It
is lossless, whatever it is, because the target verifies against the distribution that was drawn from, and free.  Called
by a training run on held-out traces, whose targets are those of temperature 1; requests with another temperature divide
both models' logits by theirs as well.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptive_spec.core import POOLED
from adaptive_spec.learning.evaluate import JudgedTrace

HEATS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)
MIN_REQUESTS = 8
FITTED, COLD_START, NO_GAIN = "fitted", "cold_start", "no_gain"
_BOOTSTRAPS = 1000


@dataclass(frozen=True, slots=True)
class HeatFit:
    """A sampling temperature and why.

    overlap_before, overlap_after: mean over tokens of the sum of min(target, draft) at 1 and at ``temperature``, the
    target's tail left out.  gain_low: lower end of the 95 % interval of the gain of the best one, requests drawn; None
    with fewer than ``MIN_REQUESTS``.  reason: fitted | cold_start | no_gain; the latter two mean 1.
    """

    temperature: float
    overlap_before: float
    overlap_after: float
    gain_low: float | None
    num_requests: int
    reason: str


def choose_heat(judged: Sequence[JudgedTrace], seed: int = 0) -> HeatFit:
    """Choose for one domain.  The traces must have been judged at ``HEATS``."""
    tokens = np.asarray([len(row.agrees) for row in judged], np.float64)
    sums = np.stack([row.overlap_at.double().sum(0).numpy() for row in judged])  # [requests, heats]
    means = sums.sum(0) / tokens.sum()
    one, best = HEATS.index(1.0), int(means.argmax())
    before, num = float(means[one]), len(judged)
    if num < MIN_REQUESTS:
        return HeatFit(1.0, before, before, None, num, COLD_START)
    random = np.random.default_rng(seed)
    drawn = random.integers(0, num, (_BOOTSTRAPS, num))
    gains = (sums[drawn, best] - sums[drawn, one]).sum(1) / tokens[drawn].sum(1)
    low = float(np.quantile(gains, 0.025))
    if low <= 0:
        return HeatFit(1.0, before, before, low, num, NO_GAIN)
    return HeatFit(HEATS[best], before, float(means[best]), low, num, FITTED)


def choose_heats(judged: Iterable[JudgedTrace], seed: int = 0) -> Mapping[str, HeatFit]:
    """Choose for every domain, and for all together under ``POOLED``."""
    by_domain: dict[str, list[JudgedTrace]] = defaultdict(list)
    for row in judged:
        by_domain[row.trace.domain].append(row)
        by_domain[POOLED].append(row)
    return {domain: choose_heat(rows, seed) for domain, rows in sorted(by_domain.items())}
