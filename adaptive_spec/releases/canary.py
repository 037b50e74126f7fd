"""The verdict on a canary: promote it, roll it back, or go on.  Pure: readings of finished requests in, a verdict out.

Two numbers per request are compared with those of the live release's requests at the same time: accepted tokens per
step, and goodput.  Losses beyond doubt roll back; a canary that, beyond doubt, is not worse by more than the margin in
either is promoted.  Called by the watch after every look at the records; it keeps nothing between two.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, Literal

from adaptive_spec.core import POOLED
from adaptive_spec.releases.sequential import lower_bound, paired, upper_bound

ACCEPTED, GOODPUT = "accepted_tokens_per_step", "goodput"
REFERENCE_REQUESTS = 10  # the first of both sides; they say what goodput is usual and are not compared
MIN_PAIRS = 20  # before a promotion, and before a domain may hold one up

Decision = Literal["promote", "roll_back", "go_on"]
Scale = Callable[[float], float]  # a number of a request -> [0, 1], growing


@dataclass(frozen=True, slots=True)
class Reading:
    """What one finished request showed, served by one release from its first step to its last.

    accepted_per_step: without the step of its prompt.  goodput: emitted tokens per second of its share of the
    decoder's time.
    """

    domain: str
    canary: bool
    accepted_per_step: float
    goodput: float


@dataclass(frozen=True, slots=True)
class Terms:
    """What was settled before the first request.

    margin_share: a loss that a promotion may leave undetected, as a share of the live release's number.
    level: probability of rolling back a canary that is as good, over all looks and numbers; of promoting one that is
    worse than the margin.
    """

    longest_chain: int
    margin_share: float
    level: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One number of the canary beside the live release's.

    canary, live: means over requests, in the number's own unit.  low, high: bounds of the mean difference, on the scale
    from 0 to 1 on which it is tested.  tolerated_low: the same lower bound once the margin is granted; above 0 the
    canary is not worse by more than that.
    """

    number: str
    domain: str
    num_pairs: int
    canary: float
    live: float
    low: float
    high: float
    tolerated_low: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with the canary, why, and the numbers."""

    decision: Decision
    reason: str
    num_canary_requests: int
    num_live_requests: int
    comparisons: tuple[Comparison, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what the database and the API show."""
        return asdict(self)


def judge(readings: Sequence[Reading], terms: Terms) -> Verdict:
    """Judge a canary by what was read so far, in the order of the requests' ends."""
    comparisons = _comparisons(readings, terms)
    num_canary = sum(reading.canary for reading in readings)
    decision, reason = _decide(comparisons)
    return Verdict(decision, reason, num_canary, len(readings) - num_canary, tuple(comparisons))


def _comparisons(readings: Sequence[Reading], terms: Terms) -> list[Comparison]:
    """Over all domains both numbers; then accepted tokens of each domain, in the order in which domains appeared.

    The level is shared out: a third to each number, a third to the domains, 1 / (j (j + 1)) of it to the j-th.
    """

    def accepted(value: float) -> float:
        return min(1.0, value / max(1, terms.longest_chain))

    third = terms.level / 3
    found = [_compare(ACCEPTED, POOLED, readings, accepted, third, terms)]
    if len(readings) > REFERENCE_REQUESTS:
        usual = median(reading.goodput for reading in readings[:REFERENCE_REQUESTS])
        later = readings[REFERENCE_REQUESTS:]
        found.append(_compare(GOODPUT, POOLED, later, lambda value: value / (value + usual), third, terms))
    domains = list(dict.fromkeys(reading.domain for reading in readings))
    for place, domain in enumerate(domains if len(domains) > 1 else (), start=1):
        its = [reading for reading in readings if reading.domain == domain]
        found.append(_compare(ACCEPTED, domain, its, accepted, third / (place * (place + 1)), terms))
    return found


def _compare(
    number: str, domain: str, readings: Sequence[Reading], scale: Scale, level: float, terms: Terms
) -> Comparison:
    values = [reading.goodput if number == GOODPUT else reading.accepted_per_step for reading in readings]
    sides = [(reading.canary, scale(value)) for reading, value in zip(readings, values, strict=True)]
    differences = paired(sides)
    tolerant = paired(sides, [scale(value * (1 - terms.margin_share)) for value in values])
    of_canary = [value for reading, value in zip(readings, values, strict=True) if reading.canary]
    of_live = [value for reading, value in zip(readings, values, strict=True) if not reading.canary]
    return Comparison(
        number=number,
        domain=domain,
        num_pairs=len(differences),
        canary=fmean(of_canary) if of_canary else 0.0,
        live=fmean(of_live) if of_live else 0.0,
        low=lower_bound(differences, level),
        high=upper_bound(differences, level),
        tolerated_low=lower_bound(tolerant, terms.level),
    )


def _decide(comparisons: Sequence[Comparison]) -> tuple[Decision, str]:
    for one in comparisons:
        if one.high < 0:
            where = "" if one.domain == POOLED else f" of domain {one.domain!r}"
            return "roll_back", f"{one.number}{where} fell beyond doubt: {_told(one)} in {one.num_pairs} pairs"
    pooled = [one for one in comparisons if one.domain == POOLED]
    if len(pooled) < 2 or any(one.num_pairs < MIN_PAIRS or one.tolerated_low <= 0 for one in pooled):
        return "go_on", "not decided yet"
    held = [one for one in comparisons if one.domain != POOLED and one.num_pairs >= MIN_PAIRS and _looks_worse(one)]
    if held:
        return "go_on", f"good enough over all, but domain {held[0].domain!r} looks worse: {_told(held[0])}"
    return "promote", "; ".join(f"{one.number} {_told(one)} in {one.num_pairs} pairs" for one in pooled)


def _looks_worse(one: Comparison) -> bool:
    return one.canary < one.live and one.tolerated_low <= 0


def _told(one: Comparison) -> str:
    return f"{one.live:.3g} to {one.canary:.3g}"
