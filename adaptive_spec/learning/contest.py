"""Which adapter serves a domain best: all of them scored on the same held-out requests, whoever served them.

The shared adapter is the default.  A domain expert off its domain is worse than a generalist (arXiv 2510.20064), and
one trained on little is noise, so a domain's own adapter must win beyond doubt.  Pure: judged traces in, verdicts out.
Called by ``own`` to decide what a release carries, and by ``evaluate``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adaptive_spec.learning.acceptance import check_same_requests, drawn, sums_of
from adaptive_spec.learning.evaluate import JudgedTrace
from adaptive_spec.settings import LearningSettings

SHARED = "shared"
WON, NO_MARGIN, COLD_START = "won", "no_margin", "cold_start"
_ERROR = 0.025  # that a domain is given an adapter which does not win by the margin: one side of a 95 % interval


@dataclass(frozen=True, slots=True)
class Contender:
    """An adapter on one domain.

    gain_share: of the shared adapter's acceptance length, by which this one's exceeds it.  gain_share_low: its lower
    bound, one-sided at 97.5 % for all contenders of the domain together; None with too few requests.
    """

    name: str
    acceptance_length: float
    gain_share: float
    gain_share_low: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who serves a domain, and why.

    winner: a contender's name, or ``SHARED``.  reason: won | no_margin | cold_start, fewer requests than
    ``learning.own_min_requests``.  shared_acceptance_length: None without any.  contenders: best first.
    """

    domain: str
    winner: str
    reason: str
    num_requests: int
    shared_acceptance_length: float | None
    contenders: tuple[Contender, ...]


def contest(
    shared: Sequence[JudgedTrace],
    contenders: Mapping[str, Sequence[JudgedTrace]],
    settings: LearningSettings,
    chain_length: int = 4,
    seed: int = 0,
) -> dict[str, Verdict]:
    """Return a verdict for every domain of the traces.

    A contender wins a domain when the lower bound of its gain in acceptance length (greedy, by replay, requests drawn
    in pairs) exceeds ``learning.own_margin_share``.  The bound is divided among the contenders (Bonferroni), so that
    another adapter to choose from is not another chance for noise.  Of several winners, the largest gain.

    Args:
        shared: the shared adapter's draft, or the untouched one where there is none yet.
        contenders: by name; judged on the same traces in the same order.

    Raises:
        ValueError: they were not.
    """
    sums = {name: sums_of(judged, chain_length) for name, judged in {SHARED: shared, **contenders}.items()}
    if len(sums) != 1 + len(contenders):
        raise ValueError(f"no contender can be called {SHARED!r}")
    check_same_requests(sums)
    found = {}
    for domain in sorted(set(sums[SHARED].domains)):
        steps = {name: its.only(domain).num_steps for name, its in sums.items()}
        found[domain] = _verdict(domain, sums[SHARED].only(domain).num_tokens.sum(), steps, settings, seed)
    return found


def _verdict(
    domain: str,
    num_tokens: float,
    steps: Mapping[str, np.ndarray],
    settings: LearningSettings,
    seed: int,
) -> Verdict:
    """steps: by draft, [requests]."""
    ours = steps[SHARED]
    enough = len(ours) >= settings.own_min_requests
    draws = drawn(len(ours), seed) if enough else None
    contenders = []
    for name in steps.keys() - {SHARED}:
        # The tokens are the same, so the ratio of the lengths is that of the steps.
        low = None
        if draws is not None:
            gains = (draws @ ours) / (draws @ steps[name]) - 1
            low = float(np.quantile(gains, _ERROR / (len(steps) - 1)))
        gain = float(ours.sum() / steps[name].sum()) - 1
        contenders.append(Contender(name, float(num_tokens / steps[name].sum()), gain, low))
    contenders.sort(key=lambda one: (-one.gain_share, one.name))
    winners = [
        one for one in contenders if one.gain_share_low is not None and one.gain_share_low > settings.own_margin_share
    ]
    reason = WON if winners else NO_MARGIN if enough else COLD_START
    winner = winners[0].name if winners else SHARED
    return Verdict(domain, winner, reason, len(ours), float(num_tokens / ours.sum()), tuple(contenders))
