"""What policies would have achieved: tokens and seconds by request, goodput, intervals, regret.

Called by ``simulate``, which chooses the policies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.calibration.baselines import Choice
from adaptive_spec.calibration.threshold import Replay
from adaptive_spec.core import StepCost

_BOOTSTRAPS = 1000


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy.  The numbers are None where it could not be judged, and ``reason`` says why.

    goodput: tokens a second.  relative: of no speculation; low, high: its 95 % interval.  drafted_tokens,
    emitted_tokens: means per step, None on the mix.  cut_share: of the steps in which it would have drafted beyond the
    longest chain on record, and is charged and credited only up to there; None on the mix.  regret: 1 - goodput /
    goodput of the best fixed length of each domain in hindsight; below 0 when that is beaten.
    """

    policy: str
    goodput: float | None = None
    relative: float | None = None
    low: float | None = None
    high: float | None = None
    regret: float | None = None
    regret_low: float | None = None
    regret_high: float | None = None
    drafted_tokens: float | None = None
    emitted_tokens: float | None = None
    cut_share: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DomainOutcome:
    """The policies on one domain's later requests, and what the judgement rests on.

    traffic_share: of the mix's tokens.  num_explored_steps: drafted at full length regardless of the policy.
    longest_chain: the longest that enough steps reached; longest_allowed: by the cost and the settings.
    num_values: steps x longest_chain, of which num_filled_values were drawn from similar steps; their verdicts count
    only in the num_cut_short steps whose chain was still whole where it ended.  num_emitted: tokens of the later
    speculative steps.
    """

    domain: str
    traffic_share: float
    num_requests: int
    num_steps: int
    num_earlier_steps: int
    num_explored_steps: int
    longest_chain: int
    longest_allowed: int
    num_values: int
    num_filled_values: int
    num_cut_short: int
    num_emitted: int
    outcomes: tuple[Outcome, ...]

    def outcome(self, policy: str) -> Outcome:
        """That of one policy."""
        return next(outcome for outcome in self.outcomes if outcome.policy == policy)


@dataclass(frozen=True, slots=True)
class TooSmall:
    """A domain that was not judged, and why."""

    domain: str
    reason: str


@dataclass(frozen=True, slots=True)
class Simulation:
    """Everything.  mix: the domains' traffic together, the same tokens of each under every policy."""

    domains: tuple[DomainOutcome, ...]
    mix: tuple[Outcome, ...]
    too_small: tuple[TooSmall, ...]
    cost: StepCost
    rows: int
    split: float
    num_seeds: int

    def domain(self, name: str) -> DomainOutcome:
        """One domain."""
        return next(part for part in self.domains if part.domain == name)

    def mix_outcome(self, policy: str) -> Outcome:
        """One policy on the mix."""
        return next(outcome for outcome in self.mix if outcome.policy == policy)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        plain = asdict(self)
        for name in ("domains", "mix", "too_small"):
            plain[name] = list(plain[name])
        return plain


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy in one domain.

    by_request: [seeds, 2, requests], tokens emitted and seconds.  drafted, emitted: means per step.  cut: share of the
    steps.  base: goodput of no speculation.
    """

    by_request: NDArray[np.float64]
    drafted: float
    emitted: float
    cut: float
    base: float

    @property
    def by_seed(self) -> NDArray[np.float64]:
        """Goodput of each completion.  [seeds]"""
        emitted, seconds = self.by_request.sum(axis=2).T
        return np.asarray(emitted / seconds)

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return float(self.by_seed.mean())

    def draws(self, seed: int) -> NDArray[np.float64]:
        """Goodput on requests drawn anew; the same seed draws the same ones for every policy.  [draws]"""
        random = np.random.default_rng(seed)
        num_seeds, _, num_requests = self.by_request.shape
        drawn = random.integers(0, num_requests, (_BOOTSTRAPS, num_requests))
        completion = np.arange(_BOOTSTRAPS) % num_seeds
        emitted, seconds = (self.by_request[completion[:, None], kind, drawn].sum(axis=1) for kind in (0, 1))
        return np.asarray(emitted / seconds)


def measure(
    choices: Sequence[Choice], replays: Sequence[Replay], cost: StepCost, rows: int, seed: int, *, waits: bool = True
) -> Measured:
    """Add up tokens and seconds; choices and replays are by seed.

    A step of several rows costs what its longest chain costs, and each row bears its share.  The others of a step are
    drawn from the same domain.

    Args:
        cost: of a step of ``rows`` rows.
        waits: False: each row is charged for its own length only, a bound from below.
    """
    verify = np.asarray(cost.verify_seconds, np.float64)
    request = np.unique(replays[0].request_index, return_inverse=True)[1]
    sums, emitted = [], []
    for number, (choice, replay) in enumerate(zip(choices, replays, strict=True)):
        paid = choice
        if rows > 1 and waits:
            paid = _with_company(choice, rows, np.random.default_rng([seed, number]))
        seconds = (paid.drafted * cost.draft_seconds + verify[paid.verified]) / rows
        tokens = 1.0 + np.minimum(choice.verified, replay.num_acceptable)
        sums.append(np.stack([np.bincount(request, weights=values) for values in (tokens, seconds)]))
        emitted.append(float(tokens.mean()))
    return Measured(
        by_request=np.stack(sums),
        drafted=float(np.mean([choice.drafted.mean() for choice in choices])),
        emitted=float(np.mean(emitted)),
        cut=float(np.mean([choice.cut.mean() for choice in choices])),
        base=rows / cost.verify_seconds[0],
    )


def _with_company(choice: Choice, rows: int, random: np.random.Generator) -> Choice:
    num_steps = len(choice.drafted)
    others = random.integers(0, num_steps, (num_steps, rows - 1))
    drafted, verified = (np.maximum(of, of[others].max(axis=1)) for of in (choice.drafted, choice.verified))
    return Choice(drafted, verified, choice.cut)


def outcomes(measured: Mapping[str, Measured | str], best: str, seed: int) -> tuple[Outcome, ...]:
    """Turn one domain's measures into outcomes; ``best`` names the policy that regret is against."""
    judged = {name: one for name, one in measured.items() if isinstance(one, Measured)}
    goodputs = {name: one.by_seed for name, one in judged.items()}
    draws = {name: one.draws(seed) for name, one in judged.items()}
    found = []
    for name, one in measured.items():
        if isinstance(one, str):
            found.append(Outcome(name, reason=one))
            continue
        found.append(_outcome(name, goodputs, draws, best, one.base, one))
    return tuple(found)


def mixed(
    measured: Mapping[str, Mapping[str, Measured | str]], weights: Mapping[str, float], best: str, seed: int
) -> tuple[Outcome, ...]:
    """All domains together: one over the seconds that a token of the mix takes.  weights: shares of the tokens."""
    names = list(next(iter(measured.values())))
    base = next(one.base for one in next(iter(measured.values())).values() if isinstance(one, Measured))
    missing, goodputs, draws = {}, {}, {}
    for name in names:
        parts = {domain: policies[name] for domain, policies in measured.items()}
        lacking = [f"{domain}: {one}" for domain, one in parts.items() if isinstance(one, str)]
        if lacking:
            missing[name] = "; ".join(lacking)
            continue
        whole = {domain: one for domain, one in parts.items() if isinstance(one, Measured)}
        goodputs[name] = _harmonic({domain: one.by_seed for domain, one in whole.items()}, weights)
        draws[name] = _harmonic(
            {domain: one.draws(seed + place) for place, (domain, one) in enumerate(whole.items())}, weights
        )
    return tuple(
        Outcome(name, reason=missing[name]) if name in missing else _outcome(name, goodputs, draws, best, base)
        for name in names
    )


def _harmonic(goodputs: Mapping[str, NDArray[np.float64]], weights: Mapping[str, float]) -> NDArray[np.float64]:
    return np.asarray(1 / sum(weights[domain] / goodput for domain, goodput in goodputs.items()))


def _outcome(
    name: str,
    goodputs: Mapping[str, NDArray[np.float64]],
    draws: Mapping[str, NDArray[np.float64]],
    best: str,
    base: float,
    measured: Measured | None = None,
) -> Outcome:
    goodput = float(goodputs[name].mean())
    low, high = np.quantile(draws[name], [0.025, 0.975]) / base
    regret_low, regret_high = np.quantile(1 - draws[name] / draws[best], [0.025, 0.975])
    return Outcome(
        policy=name,
        goodput=goodput,
        relative=goodput / base,
        low=float(low),
        high=float(high),
        regret=1 - goodput / float(goodputs[best].mean()),
        regret_low=float(regret_low),
        regret_high=float(regret_high),
        drafted_tokens=measured.drafted if measured else None,
        emitted_tokens=measured.emitted if measured else None,
        cut_share=measured.cut if measured else None,
    )
