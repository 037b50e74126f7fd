"""The gate: held-out requests, replayed with the live release and with the candidate, decide whether it may go live.

Pure: scores in, a report out.  ``learning.evaluate`` makes the scores, the pipeline calls ``gate``.  Nothing here
loads a model or touches a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.core import POOLED

MIN_REQUESTS = 5  # below it, a bootstrap over requests says nothing
_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class TraceScore:
    """One held-out request as a draft would have served it.

    agreement: share of positions where the draft's most probable token is the target's.  overlap: mean of
    sum min(target, draft).  acceptance_length: emitted tokens per step, the bonus or recovered token included.
    """

    domain: str
    request_id: str
    agreement: float
    overlap: float
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class GainInterval:
    """The paired gain in acceptance length over ``n`` requests, with its 95 % interval."""

    n: int
    before: float
    after: float
    gain: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GateReport:
    """The verdict.  ``reasons`` is empty when it passed; ``domains`` has the pooled interval first."""

    passed: bool
    reasons: list[str]
    domains: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Return what the database and the API show."""
        return asdict(self)


def paired_gain(before: Sequence[TraceScore], after: Sequence[TraceScore], seed: int = 0) -> dict[str, GainInterval]:
    """Return the gain per domain, and over all requests under ``POOLED``.

    Both lists must score the same requests, in any order.  The interval is a percentile bootstrap over requests, since
    the positions of one request depend on one another.

    Raises:
        ValueError: the lists do not hold the same requests.
    """
    pairs = _pairs(before, after)
    domains = sorted({old.domain for old, _ in pairs})
    groups = {POOLED: pairs} | {domain: [pair for pair in pairs if pair[0].domain == domain] for domain in domains}
    generator = np.random.default_rng(seed)
    return {domain: _interval(group, generator) for domain, group in groups.items() if group}


def gate(
    before: Sequence[TraceScore], after: Sequence[TraceScore], max_domain_loss_share: float, seed: int = 0
) -> GateReport:
    """Judge a candidate.

    It passes when the pooled gain's lower bound is not negative, and no domain loses, beyond doubt (its interval's
    upper bound), more than ``max_domain_loss_share`` of its acceptance length.
    """
    intervals = paired_gain(before, after, seed)
    reasons = _pooled_reasons(intervals) + _domain_reasons(intervals, max_domain_loss_share)
    return GateReport(not reasons, reasons, [{"domain": name, **asdict(row)} for name, row in intervals.items()])


def _pairs(before: Sequence[TraceScore], after: Sequence[TraceScore]) -> list[tuple[TraceScore, TraceScore]]:
    """Pair by request id; a client may use an id twice, and then the order decides."""
    old = sorted(before, key=lambda score: score.request_id)
    new = sorted(after, key=lambda score: score.request_id)
    if [score.request_id for score in old] != [score.request_id for score in new]:
        raise ValueError("before and after must score the same requests")
    return list(zip(old, new, strict=True))


def _interval(pairs: list[tuple[TraceScore, TraceScore]], generator: np.random.Generator) -> GainInterval:
    before = np.array([old.acceptance_length for old, _ in pairs])
    after = np.array([new.acceptance_length for _, new in pairs])
    difference: NDArray[np.float64] = after - before
    n = len(difference)
    means = [difference[generator.integers(n, size=n)].mean() for _ in range(_NUM_RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return GainInterval(n, float(before.mean()), float(after.mean()), float(difference.mean()), float(low), float(high))


def _pooled_reasons(intervals: Mapping[str, GainInterval]) -> list[str]:
    pooled = intervals.get(POOLED)
    if pooled is None or pooled.n < MIN_REQUESTS:
        count = pooled.n if pooled else 0
        return [f"only {count} held-out requests; the gate needs {MIN_REQUESTS}. Serve more traffic, then retrain."]
    if not pooled.low >= 0:  # written so that NaN is refused
        return [
            f"the gain over all domains is not certain: {pooled.gain:+.3f} tokens a step, 95 % interval "
            f"[{pooled.low:+.3f}, {pooled.high:+.3f}]"
        ]
    return []


def _domain_reasons(intervals: Mapping[str, GainInterval], max_loss_share: float) -> list[str]:
    return [
        f"domain {domain!r} loses: {row.before:.3f} to {row.after:.3f} tokens a step, more than {max_loss_share:.1%}"
        for domain, row in intervals.items()
        if domain != POOLED and row.n >= MIN_REQUESTS and row.high < -max_loss_share * row.before
    ]
