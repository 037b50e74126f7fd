"""How drafts compare on the same recorded requests: acceptance with intervals over requests, and paired differences.

Pure: judged traces in, numbers out.  Called by ``contest``, and for the commands ``evaluate``, ``distil`` and
``models choose-draft``.  Nothing here runs a model.

Every measure is a ratio of sums over requests, and the positions of one request depend on one another, so intervals
draw whole requests.  All drafts are seen through the same draws, which is what pairs them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.core import POOLED
from adaptive_spec.learning.evaluate import JudgedTrace, replay
from adaptive_spec.releases.paired import MIN_REQUESTS

Sums = NDArray[np.float64]  # [requests]
Draws = NDArray[np.int64]  # [resamples, requests]: how often each request was drawn

# Measure -> the sums above and below the line.
MEASURES: Mapping[str, tuple[str, str]] = {
    "acceptance_length": ("num_tokens", "num_steps"),
    "sampled_acceptance_length": ("num_tokens", "num_sampled_steps"),
    "agreement": ("num_agreeing", "num_tokens"),
    "expected_acceptance": ("overlap", "num_tokens"),
    "expected_acceptance_without_tail": ("overlap_without_tail", "num_tokens"),
}
_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its 95 % interval over requests; no interval with fewer than ``MIN_REQUESTS`` of them."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class RequestSums:
    """What one draft showed, per request: the sums that the measures are made of.  All [requests].

    num_steps: of a greedy decoder with full chains.  num_sampled_steps: expected of one that samples at temperature 1.
    overlap: of sum min(target, draft), the target's tail taken as one token; without it, a lower bound.
    """

    domains: tuple[str, ...]
    request_ids: tuple[str, ...]
    num_tokens: Sums
    num_agreeing: Sums
    num_steps: Sums
    num_sampled_steps: Sums
    overlap: Sums
    overlap_without_tail: Sums

    def of(self, measure: str) -> tuple[Sums, Sums]:
        """The sums above and below the line of one of ``MEASURES``."""
        above, below = MEASURES[measure]
        return getattr(self, above), getattr(self, below)

    def only(self, domain: str) -> "RequestSums":
        """Those of one domain; all under ``POOLED``."""
        if domain == POOLED:
            return self
        kept = [place for place, name in enumerate(self.domains) if name == domain]
        columns = (getattr(self, name)[kept] for name in _COLUMNS)
        return RequestSums(
            tuple(self.domains[place] for place in kept), tuple(self.request_ids[place] for place in kept), *columns
        )


_COLUMNS = ("num_tokens", "num_agreeing", "num_steps", "num_sampled_steps", "overlap", "overlap_without_tail")


def sums_of(judged: Sequence[JudgedTrace], chain_length: int) -> RequestSums:
    """Sum up judged traces, for chains of ``chain_length`` tokens.

    Where they were judged at temperatures, the first must be 1: it gives the overlap without the tail.
    """
    rows = [
        (
            len(row.agrees),
            sum(row.agrees),
            sum(1 for _ in replay(row.agrees, chain_length)),
            expected_steps(row.overlap.double().numpy(), chain_length),
            row.overlap.double().sum().item(),
            row.overlap_at[:, 0].double().sum().item() if row.overlap_at.shape[1] else np.nan,
        )
        for row in judged
    ]
    columns = np.asarray(rows, np.float64).reshape(len(rows), len(_COLUMNS)).T
    return RequestSums(
        tuple(row.trace.domain for row in judged), tuple(row.trace.request_id for row in judged), *columns
    )


def expected_steps(acceptance: NDArray[np.float64], chain_length: int) -> float:
    """Return the expected number of steps that emit a text whose positions are accepted with these probabilities.

    A step that begins at a position keeps n tokens with the probability that n positions in a row are accepted and the
    next is not, or all of the chain, and emits one more; the next one begins there.  With probabilities of 0 and 1
    it is the count of ``replay``.  Acceptance at a position is taken as independent of the one before, given the text.

    Args:
        acceptance: [positions], sum of min(target, draft)  (Leviathan et al. 2023, eq. 9).
    """
    num = len(acceptance)
    padded = np.concatenate([acceptance, np.zeros(chain_length)])
    windows = (
        np.lib.stride_tricks.sliding_window_view(padded, chain_length)[:num] if chain_length else np.ones((num, 0))
    )
    reached = np.cumprod(np.concatenate([np.ones((num, 1)), windows], 1), 1)  # [positions, 1 + chain]: n kept or more
    kept = reached - np.concatenate([reached[:, 1:], np.zeros((num, 1))], 1)  # exactly n kept
    begins = np.zeros(num + chain_length + 2)
    begins[0] = 1.0
    for position in range(num):
        begins[position + 1 : position + chain_length + 2] += begins[position] * kept[position]
    return float(begins[:num].sum())


def drawn(num_requests: int, seed: int) -> Draws:
    """Draw requests with replacement."""
    shares = np.full(num_requests, 1 / num_requests)
    return np.random.default_rng(seed).multinomial(num_requests, shares, size=_NUM_RESAMPLES)


def ratio(above: Sums, below: Sums, draws: Draws) -> Interval:
    """Return a measure: the ratio of the sums."""
    return interval(above.sum() / below.sum(), (draws @ above) / (draws @ below), len(above))


def ratio_difference(ours: tuple[Sums, Sums], theirs: tuple[Sums, Sums], draws: Draws) -> Interval:
    """Return a measure of our draft minus that of theirs, request by request the same."""
    value = ours[0].sum() / ours[1].sum() - theirs[0].sum() / theirs[1].sum()
    resampled = (draws @ ours[0]) / (draws @ ours[1]) - (draws @ theirs[0]) / (draws @ theirs[1])
    return interval(value, resampled, len(ours[0]))


def interval(value: float, resampled: NDArray[np.float64], num_requests: int) -> Interval:
    """The percentile interval, where there are requests enough for one."""
    if num_requests < MIN_REQUESTS:
        return Interval(float(value), None, None)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


def check_same_requests(drafts: Mapping[str, RequestSums]) -> None:
    """Make sure that what is compared in pairs is paired.

    Raises:
        ValueError: the drafts were not judged on the same requests in the same order.
    """
    first, *others = drafts.values()
    if any(other.request_ids != first.request_ids or other.domains != first.domains for other in others):
        raise ValueError("all drafts must be judged on the same requests in the same order")


def figures(
    drafts: Mapping[str, RequestSums], pairs: Sequence[tuple[str, str]], seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield flat records, all requests first under ``POOLED``, then domain by domain.

    Part ``draft``: every measure of a draft, with its interval as ``_low`` and ``_high``.  Part ``gain``, one for each
    of ``pairs`` (draft, against): the differences.

    Raises:
        ValueError: the drafts were not judged on the same requests in the same order.
    """
    check_same_requests(drafts)
    first = next(iter(drafts.values()))
    for domain in [POOLED, *sorted(set(first.domains))]:
        its = {name: sums.only(domain) for name, sums in drafts.items()}
        num_tokens = next(iter(its.values())).num_tokens
        size = {"num_requests": len(num_tokens), "num_tokens": int(num_tokens.sum())}
        draws = drawn(len(num_tokens), seed)
        for name, sums in its.items():
            measured = {measure: ratio(*sums.of(measure), draws) for measure in MEASURES}
            yield {"part": "draft", "domain": domain, "draft": name, **size, **_flat(measured)}
        for name, against in pairs:
            gained = {m: ratio_difference(its[name].of(m), its[against].of(m), draws) for m in MEASURES}
            yield {"part": "gain", "domain": domain, "draft": name, "against": against, **size, **_flat(gained)}


def _flat(measured: Mapping[str, Interval]) -> dict[str, float | None]:
    flat: dict[str, float | None] = {}
    for name, its in measured.items():
        flat |= {name: its.value, f"{name}_low": its.low, f"{name}_high": its.high}
    return flat
