"""How far a verifier may be loosened under a divergence budget, from recorded chains and with a stated confidence.

Learn then Test (Angelopoulos, Bates, Candès, Jordan, Lei 2021, arXiv 2110.01052).  A path of rules goes from exact to
loose, fixed before any record is looked at.  Each rule is a hypothesis, "its expected divergence share exceeds the
budget", with a Hoeffding-Bentkus p-value over requests; they are tested in the order of the path until one is not
rejected (fixed sequence testing).  Every rule rejected until then is certified, all at once, so any of them may be
taken: the one with the most tokens a step.

What holds: where requests are exchangeable, the probability that the rule taken has an expected share above the
budget is at most 1 - confidence, at any number of requests.  A request's share is that of diverging tokens among those
that its measured chains would have emitted; the expectation is over requests, long and short alike.  All requests on
record are tested: a test needs no held-out part.  What an earlier choice came to on later requests is reported beside
it (``backtest``), because that is where a change of traffic shows.

What does not follow: chains on record start from texts that the verifier in force wrote, under a relaxed rule later
chains start from others; traffic, chain lengths and temperatures change; each calibration errs with that probability
anew; and requests with more steps are likelier to have been measured.  Nothing of this is needed for the live account
(``decoding/budget.py``), which holds whatever the rule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from mapie.risk_control import control_fwer
from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value
from numpy.typing import NDArray

from adaptive_spec.core import CALIBRATED_VERIFIERS, Rule
from adaptive_spec.records.evidence import RecordedChains
from adaptive_spec.verification.divergence import diverging_tokens
from adaptive_spec.verification.exact import kept
from adaptive_spec.verification.relaxed import comparing_passes

REPLAYABLE = ("exact", *CALIBRATED_VERIFIERS)
_OVERLAPS = (1.0, 0.8, 0.75, 0.66, 0.6, 0.5, 0.4, 0.33, 0.25, 0.2, 0.0)
_ALIKE = (0.99, 0.98, 0.97, 0.95, 0.93, *(round(0.9 - 0.05 * step, 2) for step in range(19)))  # down to 0
_EARLIER_SHARE = 2 / 3  # of the requests, for the backtest


def path(verifier: str, numbers: Rule) -> tuple[Rule, ...]:
    """The rules of a verifier from exact to loosest; a hybrid loosens both thresholds side by side.

    Args:
        numbers: n-gram size and measure are taken from it, and what other verifiers read is left as it is.
    """
    rule = replace(numbers, verifier=verifier)
    match verifier:
        case "ngram":
            loosened = [replace(rule, min_overlap=overlap) for overlap in _OVERLAPS]
        case "logits":
            loosened = [replace(rule, min_similarity=alike) for alike in _ALIKE]
        case "hybrid":
            beside = [_OVERLAPS[place * len(_OVERLAPS) // len(_ALIKE)] for place in range(len(_ALIKE))]
            pairs = zip(beside, _ALIKE, strict=True)
            loosened = [replace(rule, min_overlap=overlap, min_similarity=alike) for overlap, alike in pairs]
        case _:
            raise ValueError(f"the thresholds of {verifier!r} cannot be replayed")
    return (replace(numbers, verifier="exact"), *loosened)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What rules would have made of the measured chains, by request, in order of time.

    num_divergent, num_emitted: [rules, requests], tokens.  num_steps: [requests], measured ones.
    """

    rules: tuple[Rule, ...]
    num_divergent: NDArray[np.int64]
    num_emitted: NDArray[np.int64]
    num_steps: NDArray[np.int64]

    @property
    def num_requests(self) -> int:
        return len(self.num_steps)

    @property
    def shares(self) -> NDArray[np.float64]:
        """Of diverging tokens among emitted ones: [rules, requests]."""
        return self.num_divergent / self.num_emitted

    @property
    def tokens_per_step(self) -> NDArray[np.float64]:
        """[rules]"""
        return self.num_emitted.sum(-1) / self.num_steps.sum()

    def take(self, requests: NDArray[np.int64] | slice) -> "Replayed":
        """Some of the requests, or the same one several times."""
        return Replayed(
            self.rules, self.num_divergent[:, requests], self.num_emitted[:, requests], self.num_steps[requests]
        )


def replay(rules: Sequence[Rule], recorded: RecordedChains) -> Replayed:
    """Judge recorded chains by rules, each of ``REPLAYABLE``, as if no account limited what may diverge."""
    strict, lengths = torch.from_numpy(recorded.strict), torch.from_numpy(recorded.lengths)
    most = torch.from_numpy(recorded.most_emitted)
    count = int(recorded.request_index.max(initial=-1)) + 1

    def by_request(values: Any) -> NDArray[np.int64]:
        return np.bincount(recorded.request_index, weights=values, minlength=count).astype(np.int64)

    divergent, emitted = [], []
    for rule in rules:
        num_kept = torch.minimum(kept(strict | _passes(rule, recorded), lengths), most)
        divergent.append(by_request(diverging_tokens(strict, num_kept).sum(-1).numpy()))
        emitted.append(by_request(torch.minimum(num_kept + 1, most).numpy()))
    steps = np.bincount(recorded.request_index, minlength=count)
    return Replayed(tuple(rules), np.array(divergent), np.array(emitted), steps)


def _passes(rule: Rule, recorded: RecordedChains) -> torch.Tensor:
    if rule.verifier == "exact":
        return torch.from_numpy(recorded.strict)
    chain, own = torch.from_numpy(recorded.chain), torch.from_numpy(recorded.target_tokens)
    lengths = torch.from_numpy(recorded.lengths)
    return comparing_passes(rule, chain, own, lengths, lambda rows: torch.from_numpy(recorded.similarities[rows]))


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule for a domain and what speaks for it.

    reason: ``certified``; or, and the rule is exact: ``not_enough`` requests for any rule, even one that never
    diverges, ``nothing_fits``, none that emits more than exact, or ``nothing_gained``, as not even the loosest does.
    p_value: of the rule's hypothesis; where it is exact, of the strictest rule that could not be certified.
    requests_needed: to certify a rule that never diverges.  divergence_share: mean over requests.
    """

    rule: Rule
    reason: str
    p_value: float
    num_requests: int
    requests_needed: int
    divergence_share: float
    tokens_per_step: float


def choose(paths: Sequence[Replayed], budget: float, confidence: float) -> Choice:
    """Take the certified rule with the most tokens a step, of equals the strictest; exact where none is certified.

    Args:
        paths: one per verifier, each from exact to loose, over at least one request; the chance to err is divided
            among them.
        budget: above 0.
    """
    error = (1 - confidence) / len(paths)
    tested = [_p_values(replayed, budget) for replayed in paths]
    certified = [control_fwer(p_values, error, "fixed_sequence") for p_values in tested]
    pairs = [(place, int(index)) for place, indices in enumerate(certified) for index in indices]
    # Of equals the first, and the first of all is exact.
    place, index = max([(0, 0), *pairs], key=lambda pair: paths[pair[0]].tokens_per_step[pair[1]])
    chosen, stop = paths[place], min(len(certified[0]), len(tested[0]) - 1)
    if index:
        reason, stop = "certified", index
    elif not pairs:
        reason = "not_enough"
    else:
        whole = all(len(its) == len(p_values) for its, p_values in zip(certified, tested, strict=True))
        reason = "nothing_gained" if whole else "nothing_fits"
    return Choice(
        rule=chosen.rules[index],
        reason=reason,
        p_value=float(tested[place][stop]),
        num_requests=chosen.num_requests,
        requests_needed=requests_needed(budget, confidence, len(paths)),
        divergence_share=float(chosen.shares[index].mean()),
        tokens_per_step=float(chosen.tokens_per_step[index]),
    )


def requests_needed(budget: float, confidence: float, num_paths: int = 1) -> int:
    """So many requests without any divergence certify a rule; with some, more are needed."""
    return 1 if budget >= 1 else math.ceil(math.log((1 - confidence) / num_paths) / math.log1p(-budget))


def _p_values(replayed: Replayed, budget: float) -> NDArray[np.float64]:
    """Of every rule's hypothesis that its expected share exceeds the budget: [rules]."""
    if budget >= 1:
        return np.zeros(len(replayed.rules))
    found: NDArray[np.float64] = compute_hoeffding_bentkus_p_value(
        replayed.shares.mean(-1), replayed.num_requests, float(budget)
    )
    return found[:, 0]


@dataclass(frozen=True, slots=True)
class Backtest:
    """What the earlier requests alone would have chosen, and its divergence share on the later ones."""

    rule: Rule
    num_requests: int  # later ones
    divergence_share: float


def backtest(paths: Sequence[Replayed], budget: float, confidence: float) -> Backtest | None:
    """Choose on the first two thirds of the requests and look at the rest; None where that leaves none."""
    cut = math.ceil(_EARLIER_SHARE * paths[0].num_requests)
    later = [replayed.take(slice(cut, None)) for replayed in paths]
    if not later[0].num_requests:
        return None
    rule = choose([replayed.take(slice(cut)) for replayed in paths], budget, confidence).rule
    return Backtest(rule, later[0].num_requests, share_of(rule, later))


def share_of(rule: Rule, paths: Sequence[Replayed]) -> float:
    """A rule's divergence share, the mean over requests."""
    replayed = next(its for its in paths if rule in its.rules)
    return float(replayed.shares[replayed.rules.index(rule)].mean())
