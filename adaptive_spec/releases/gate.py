"""The gate: held-out requests, as the live release and the candidate would serve them, decide whether it may go live.

Pure: what both would have done comes in, a report goes out.  ``learning.goodput`` makes the former, the pipeline calls
``gate`` and adds the checks for which a bundle or a decoder is needed.  docs/releases.md says what each check asks and
what it cannot see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.core import POOLED
from adaptive_spec.releases.paired import MIN_REQUESTS, Change, change_of_ratio
from adaptive_spec.releases.report import Check, GateReport

GAIN_CONFIDENCE = 0.975  # one-sided, of the gain that is claimed
LOSS_CONFIDENCE = 0.95  # one-sided, that a domain loses more than it may
RARE = "rare domains"  # those with too few requests for a verdict of their own, together
TOLERATED_ERROR = 0.01  # by which the calibration error may grow; about what chance alone shows on a few hundred tokens
_FEWEST_TOKENS = 64  # of a domain, to see that acceptance is degenerate
_NEAR_ZERO, _NEAR_ONE = 0.02, 0.99
_LOOPING_SHARE = 0.5  # of a domain's texts that end in loops
_NUM_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Served:
    """One held-out request as a release would have served it: its recorded text, token by token.

    num_steps: with full chains, whatever the thresholds say.  seconds: with chains as long as the release's own
    thresholds make them, at the measured cost of a step.  num_agreeing: positions where the draft's most probable token
    is the target's.  gaps: [bins], confidence less acceptance summed over reached positions, by confidence.
    num_reached: such positions.  loops: the text ends in a loop.
    """

    domain: str
    request_id: str
    num_tokens: int
    num_steps: int
    seconds: float
    num_agreeing: int
    gaps: NDArray[np.float64]
    num_reached: int
    loops: bool = False


@dataclass(frozen=True, slots=True)
class _Group:
    """The requests of a domain, of several, or all; ``before`` and ``after`` in the same order."""

    name: str
    before: Sequence[Served]
    after: Sequence[Served]

    @property
    def goodput(self) -> Change:
        return change_of_ratio(_column(self.before, "seconds"), _column(self.after, "seconds"))

    @property
    def acceptance_length(self) -> Change:
        return change_of_ratio(_column(self.before, "num_steps"), _column(self.after, "num_steps"))

    @property
    def loses(self) -> Mapping[str, Change]:
        """What a domain must not lose, by name."""
        return {"goodput": self.goodput, "acceptance length": self.acceptance_length}


def gate(before: Sequence[Served], after: Sequence[Served], max_domain_loss_share: float, seed: int = 0) -> GateReport:
    """Judge a candidate against the live release.

    Args:
        before, after: the live release and the candidate on the same requests, in any order.
        max_domain_loss_share: of goodput and of acceptance length, that no domain may lose.

    Raises:
        ValueError: they are not the same requests.
    """
    groups = _groups(before, after)
    everything = groups[0]
    if len(everything.before) < MIN_REQUESTS:
        reason = f"{len(everything.before)} held-out requests, {MIN_REQUESTS} needed. Serve more traffic, then retrain."
        return GateReport((Check("goodput", False, reason, {"num_requests": len(everything.before)}),))
    checks = (
        _gain(everything, max_domain_loss_share),
        _domains(groups[1:], max_domain_loss_share),
        _calibration(everything, seed),
        _degenerate(groups[1:]),
    )
    return GateReport(checks, tuple(_record(group, max_domain_loss_share) for group in groups))


def _groups(before: Sequence[Served], after: Sequence[Served]) -> list[_Group]:
    """All requests, each domain with enough of them, and the rest together."""
    old, new = (sorted(side, key=lambda row: (row.request_id, row.domain)) for side in (before, after))
    if [(row.request_id, row.domain) for row in old] != [(row.request_id, row.domain) for row in new]:
        raise ValueError("before and after must have served the same requests")
    places: dict[str, list[int]] = {}
    for place, row in enumerate(old):
        places.setdefault(row.domain, []).append(place)
    enough = {domain: found for domain, found in sorted(places.items()) if len(found) >= MIN_REQUESTS}
    rare = [place for domain, found in sorted(places.items()) if domain not in enough for place in found]
    named = enough | ({RARE: rare} if rare else {})
    everything = _Group(POOLED, old, new)
    return [everything, *(_Group(n, [old[i] for i in at], [new[i] for i in at]) for n, at in named.items())]


def _gain(everything: _Group, tolerated: float) -> Check:
    """A faster release, or a better draft that is no slower: where speculation does not pay yet, only the latter can.

    Comparisons are written so that NaN is refused.
    """
    goodput, length = everything.goodput, everything.acceptance_length
    low, low_of_length = goodput.low(GAIN_CONFIDENCE), length.low(GAIN_CONFIDENCE)
    told = f"goodput {_told(goodput)}, acceptance length {_told(length)}"
    figures = {
        "num_requests": goodput.num_requests,
        "gain_share": goodput.share,
        "low": low,
        "high": goodput.high(GAIN_CONFIDENCE),
        "acceptance_length_gain_share": length.share,
        "acceptance_length_low": low_of_length,
        "acceptance_length_high": length.high(GAIN_CONFIDENCE),
    }
    if low > 0:
        return Check("goodput", True, f"faster: {told}", {**figures, "claims": "speed"})
    if low >= -tolerated and low_of_length > 0:
        return Check("goodput", True, f"a better draft, as fast: {told}", {**figures, "claims": "acceptance length"})
    return Check("goodput", False, f"no gain is certain: {told}", {**figures, "claims": None})


def _domains(groups: Sequence[_Group], tolerated: float) -> Check:
    """No domain loses more than is tolerated, beyond doubt; and what could not be seen is told."""
    losses = [
        f"{group.name} loses {measure} ({_told(change)})"
        for group in groups
        for measure, change in group.loses.items()
        if change.high(LOSS_CONFIDENCE) < -tolerated
    ]
    unproven = [
        group.name
        for group in groups
        if not all(change.low(LOSS_CONFIDENCE) >= -tolerated for change in group.loses.values())
    ]
    figures = {"max_domain_loss_share": tolerated, "unproven": unproven}
    if losses:
        return Check("domains", False, f"more than {tolerated:.1%}: {'; '.join(losses)}", figures)
    doubt = f"; on so few requests a loss cannot be ruled out in {', '.join(unproven)}" if unproven else ""
    return Check("domains", True, f"none loses more than {tolerated:.1%} beyond doubt{doubt}", figures)


def _calibration(everything: _Group, seed: int) -> Check:
    """Confidences mean acceptance no less than the live release's do: expected calibration error, requests drawn."""
    num = len(everything.before)
    shares = np.full(num, 1 / num)
    draws = np.random.default_rng(seed).multinomial(num, shares, size=_NUM_RESAMPLES)
    old, new = (_errors(side, np.ones((1, num)))[0] for side in (everything.before, everything.after))
    grown = _errors(everything.after, draws) - _errors(everything.before, draws)
    low, high = (float(bound) for bound in np.quantile(grown, [1 - GAIN_CONFIDENCE, GAIN_CONFIDENCE]))
    told = f"calibration error {old:.3f} → {new:.3f}, change in [{low:+.3f}, {high:+.3f}]"
    figures = {"before": float(old), "after": float(new), "low": low, "high": high, "tolerated": TOLERATED_ERROR}
    return Check("calibration", low <= TOLERATED_ERROR, told, figures)


def _errors(side: Sequence[Served], draws: NDArray[Any]) -> NDArray[np.float64]:
    """Expected calibration error of each draw.  draws: [resamples, requests], how often each counts -> [resamples]"""
    gaps = np.stack([row.gaps for row in side])
    reached = _column(side, "num_reached")
    return np.asarray(np.abs(draws @ gaps).sum(1) / np.maximum(draws @ reached, 1.0))


def _degenerate(groups: Sequence[_Group]) -> Check:
    """Weights that are broken accept nothing; a draft that only repeats accepts everything where texts repeat.

    Asked of few tokens already, where no interval says anything.
    """
    found, rates = [], {}
    for group in groups:
        num = _column(group.after, "num_tokens").sum()
        old, new = (float(_column(side, "num_agreeing").sum() / max(1, num)) for side in (group.before, group.after))
        looping = float(np.mean([row.loops for row in group.after]))
        rates[group.name] = {"agreement_before": old, "agreement": new, "looping_share": looping}
        if num < _FEWEST_TOKENS:
            continue
        if new <= _NEAR_ZERO < old:
            found.append(f"{group.name} accepts {new:.1%} of the draft's tokens, before {old:.1%}")
        if new >= _NEAR_ONE and looping >= _LOOPING_SHARE:
            found.append(f"{group.name} accepts {new:.1%} on texts of which {looping:.0%} end in loops")
    reason = "; ".join(found) or "acceptance is neither near 0 nor near 1 by repetition"
    return Check("degenerate", not found, reason, {"domains": rates})


def _record(group: _Group, tolerated: float) -> dict[str, Any]:
    num_tokens = float(_column(group.after, "num_tokens").sum())
    goodput, length = group.goodput, group.acceptance_length

    def per(side: Sequence[Served], name: str) -> float:
        return num_tokens / max(float(_column(side, name).sum()), 1e-12)

    return {
        "domain": group.name,
        "num_requests": len(group.before),
        "goodput_before": per(group.before, "seconds"),
        "goodput": per(group.after, "seconds"),
        "goodput_gain_share": goodput.share,
        "goodput_low": goodput.low(GAIN_CONFIDENCE),
        "goodput_high": goodput.high(GAIN_CONFIDENCE),
        "acceptance_length_before": per(group.before, "num_steps"),
        "acceptance_length": per(group.after, "num_steps"),
        "acceptance_length_gain_share": length.share,
        "acceptance_length_low": length.low(GAIN_CONFIDENCE),
        "acceptance_length_high": length.high(GAIN_CONFIDENCE),
        "smallest_loss_seen_share": tolerated + goodput.high(LOSS_CONFIDENCE) - goodput.share,
    }


def _told(change: Change) -> str:
    low, high = change.low(GAIN_CONFIDENCE), change.high(GAIN_CONFIDENCE)
    return f"{change.share:+.1%} [{low:+.1%}, {high:+.1%}]"


def _column(side: Sequence[Served], name: str) -> NDArray[np.float64]:
    return np.asarray([getattr(row, name) for row in side], np.float64)
