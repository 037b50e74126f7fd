"""What other length policies would have made of recorded traffic.

Called by ``bench.simulate_records`` and from Python.  Requests are split by time: policies that learn learn on the
earlier ones, all are judged on the later ones.  Chains that the live policy or a refused token cut short are completed
by ``Replay``, once per seed; goodput is the mean over seeds, intervals draw whole requests, each draw on one of the
completions, so that they hold both kinds of chance.  That steps would begin elsewhere in the text under another policy
is ignored, as in ``threshold``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.calibration.baselines import Choice, by_floors, fixed, oracle, transformers_rule
from adaptive_spec.calibration.calibrate import calibrate
from adaptive_spec.calibration.logistic import Verification, learn_verification
from adaptive_spec.calibration.outcomes import DomainOutcome, Measured, Simulation, TooSmall, measure, mixed, outcomes
from adaptive_spec.calibration.threshold import MIN_REACHED, Replay
from adaptive_spec.core import POOLED, Scaling, StepCost, Thresholds
from adaptive_spec.drafting.policy import stopping_floors, threshold_floors
from adaptive_spec.errors import NotEnoughDataError
from adaptive_spec.records.observations import Observations, pool
from adaptive_spec.settings import CalibrationSettings

OFF = "off"
BEST_FIXED = "best fixed"
ORACLE = "oracle"
OURS = ("live thresholds", "live stopping", "fresh thresholds", "fresh stopping")
FIXED_LENGTHS = (1, 2, 4, 6)
MIN_REQUESTS = 5  # later ones, to judge a domain
_NEGLIGIBLE = 0.005  # share of chains still whole at the longest length on record
_NOT_FITTED = "too few earlier steps to fit"

Policy = Callable[[Replay], Choice]


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What the earlier requests teach.  A domain without thresholds of its own has the pooled ones."""

    thresholds: Mapping[str, Thresholds]  # empty: nothing could be fitted
    verification: Verification | None


def simulate(
    observations: Mapping[str, Observations],
    cost: StepCost,
    now: Mapping[str, Thresholds],
    settings: CalibrationSettings,
    *,
    traffic: Mapping[str, float] | None = None,
    max_chain_length: int = 6,
    rows: int = 1,
    split: float = 0.5,
    num_seeds: int = 5,
    seed: int = 0,
) -> Simulation:
    """Judge every policy on the later requests, by domain and on the mix.

    Args:
        observations: by domain, of one release and one drafter, requests numbered in time across domains.
        cost: of a step of ``rows`` rows; a batch is taken to hold requests of one domain.
        now: the thresholds that are live, by domain; ``POOLED`` serves the rest.
        traffic: tokens by domain, which weigh the mix; None: those emitted in the later requests.
        split: share of the requests that is learnt from.

    Raises:
        NotEnoughDataError: no domain has ``MIN_REACHED`` steps of ``MIN_REQUESTS`` later requests.
    """
    longest = min(max_chain_length, len(cost.verify_seconds) - 1)
    early, late = split_by_request(observations, split)
    learnt = _learn(early, cost, settings, longest, seed)
    judged: dict[str, DomainOutcome] = {}
    measured: dict[str, dict[str, Measured | str]] = {}
    small: list[TooSmall] = []
    for domain in sorted(observations):
        if reason := _too_small(late.get(domain)):
            small.append(TooSmall(domain, reason))
            continue
        replays = [Replay.complete(late[domain], Scaling(), longest, seed + number) for number in range(num_seeds)]
        live = now.get(domain) or now.get(POOLED) or Thresholds()
        policies = _policies(domain, live, learnt, cost, longest, replays[0], rows)
        measured[domain] = _measured(policies, replays, cost, rows, seed)
        judged[domain] = _domain_outcome(
            domain, late[domain], early.get(domain), replays, longest, measured[domain], seed
        )
    if not judged:
        told = "; ".join(f"{entry.domain}: {entry.reason}" for entry in small) or "no speculative step is on record"
        raise NotEnoughDataError(
            f"Nothing can be judged ({told}). A domain needs {MIN_REACHED} speculative steps of {MIN_REQUESTS} "
            "requests after the split: serve more traffic, name an earlier release with --release, or lower --split."
        )
    tokens = traffic or {domain: float(part.num_emitted) for domain, part in judged.items()}
    weights = _shares({domain: tokens.get(domain, 0.0) for domain in judged})
    return Simulation(
        domains=tuple(replace(part, traffic_share=weights[domain]) for domain, part in judged.items()),
        mix=mixed(measured, weights, BEST_FIXED, seed),
        too_small=tuple(small),
        cost=cost,
        rows=rows,
        split=split,
        num_seeds=num_seeds,
    )


def split_by_request(
    observations: Mapping[str, Observations], share: float
) -> tuple[dict[str, Observations], dict[str, Observations]]:
    """Split at one moment for all domains: the first ``share`` of the requests, and the rest; domains may lack one."""
    numbers = [part.request_index for part in observations.values()]
    requests = np.unique(np.concatenate([np.zeros(0, np.int64), *numbers]))
    first_late = requests[min(round(share * len(requests)), len(requests) - 1)] if len(requests) else 0
    early: dict[str, Observations] = {}
    late: dict[str, Observations] = {}
    for domain, part in observations.items():
        is_early = part.request_index < first_late
        for found, mask in ((early, is_early), (late, ~is_early)):
            if mask.any():
                found[domain] = part.only(mask)
    return early, late


def _too_small(late: Observations | None) -> str | None:
    num_steps = 0 if late is None else late.num_steps
    num_requests = 0 if late is None else late.num_requests
    if num_steps >= MIN_REACHED and num_requests >= MIN_REQUESTS:
        return None
    return f"{num_steps} steps of {num_requests} later requests"


def _learn(
    early: Mapping[str, Observations], cost: StepCost, settings: CalibrationSettings, longest: int, seed: int
) -> _Learnt:
    fitted = calibrate(early, {1: cost}, settings, longest, {}, seed)
    if fitted[POOLED].report["source"] == "kept":
        return _Learnt({}, None)
    thresholds = {domain: calibration.thresholds for domain, calibration in fitted.items()}
    pooled = pool([early[domain] for domain in sorted(early)])
    try:
        return _Learnt(thresholds, learn_verification(pooled, cost, longest, seed))
    except NotEnoughDataError:
        return _Learnt(thresholds, None)


def _policies(
    domain: str, live: Thresholds, learnt: _Learnt, cost: StepCost, allowed: int, replay: Replay, rows: int
) -> dict[str, Policy | str]:
    """By name; a text says why a policy cannot be judged.

    A fixed length beyond the longest chain on record can be where hardly any chain is still whole there.
    """
    longest = replay.max_chain_length
    if (replay.num_acceptable >= longest).mean() <= _NEGLIGIBLE:
        longest = allowed
    policies: dict[str, Policy | str] = {OFF: _fixed(0)}
    for length in FIXED_LENGTHS:
        told = "chains so long are not on record" if length <= allowed else "longer than settings and cost allow"
        policies[f"fixed {length}"] = _fixed(length) if length <= longest else told
    policies["live thresholds"] = _by_thresholds(live, allowed, rows)
    policies["live stopping"] = (
        _by_stopping(live, cost, allowed) if live.survival else "the release has no survival curve of this domain"
    )
    fresh, pooled = learnt.thresholds.get(domain) or learnt.thresholds.get(POOLED), learnt.thresholds.get(POOLED)
    policies["fresh thresholds"] = _by_thresholds(fresh, allowed, rows) if fresh else _NOT_FITTED
    policies["fresh stopping"] = _by_stopping(fresh, cost, allowed) if fresh else _NOT_FITTED
    policies["pooled thresholds"] = _by_thresholds(pooled, allowed, rows) if pooled else _NOT_FITTED
    policies["transformers"] = _transformers(allowed)
    plan = learnt.verification
    policies["logistic"] = (lambda replay: plan.choose(replay.confidence, cost)) if plan else _NOT_FITTED
    return policies


def _fixed(length: int) -> Policy:
    return lambda replay: fixed(len(replay.accepted), length)


def _by_thresholds(thresholds: Thresholds, allowed: int, rows: int) -> Policy:
    floors = threshold_floors(thresholds.lengths_at(rows), allowed)
    return lambda replay: by_floors(replay.confidence, thresholds.scaling, floors, replay.request_temperature)


def _by_stopping(thresholds: Thresholds, cost: StepCost, allowed: int) -> Policy:
    floors = stopping_floors(thresholds.survival, cost, allowed)
    return lambda replay: by_floors(replay.confidence, thresholds.scaling, floors, replay.request_temperature)


def _transformers(allowed: int) -> Policy:
    def choose(replay: Replay) -> Choice:
        choice = transformers_rule(replay.confidence, replay.accepted, replay.request_index)
        return choice if replay.max_chain_length < allowed else Choice.of(choice.drafted)  # its 20 are not asked about

    return choose


def _measured(
    policies: Mapping[str, Policy | str], replays: Sequence[Replay], cost: StepCost, rows: int, seed: int
) -> dict[str, Measured | str]:
    """Every policy, then the best fixed length in hindsight and the oracle."""

    def run(policy: Policy, *, waits: bool = True) -> Measured:
        return measure([policy(replay) for replay in replays], replays, cost, rows, seed, waits=waits)

    found: dict[str, Measured | str] = {
        name: policy if isinstance(policy, str) else run(policy) for name, policy in policies.items()
    }
    lengths = range(replays[0].max_chain_length + 1)
    found[BEST_FIXED] = max((run(_fixed(length)) for length in lengths), key=lambda one: one.goodput)
    found[ORACLE] = run(lambda replay: oracle(replay.num_acceptable, cost), waits=False)
    return found


def _domain_outcome(
    domain: str,
    late: Observations,
    early: Observations | None,
    replays: Sequence[Replay],
    allowed: int,
    measured: Mapping[str, Measured | str],
    seed: int,
) -> DomainOutcome:
    replay = replays[0]
    num_values = replay.accepted.size
    alive = (replay.num_reached < replay.max_chain_length) & (_kept(late) >= replay.num_reached)
    return DomainOutcome(
        domain=domain,
        traffic_share=0.0,
        num_requests=len(np.unique(replay.request_index)),
        num_steps=len(replay.accepted),
        num_earlier_steps=0 if early is None else early.num_steps,
        num_explored_steps=replay.num_explored_steps,
        longest_chain=replay.max_chain_length,
        longest_allowed=allowed,
        num_values=num_values,
        num_filled_values=num_values - int(replay.num_reached.sum()),
        num_cut_short=int(alive.sum()),
        num_emitted=int((1 + _kept(late)).sum()),
        outcomes=outcomes(measured, BEST_FIXED, seed),
    )


def _kept(observed: Observations) -> NDArray[np.int64]:
    """Tokens of each recorded step that were kept.  [steps]"""
    step = np.cumsum(observed.position == 0) - 1
    return np.asarray(np.bincount(step, weights=observed.accepted), np.int64)


def _shares(tokens: Mapping[str, float]) -> dict[str, float]:
    total = sum(tokens.values())
    return {domain: count / total if total else 1 / len(tokens) for domain, count in tokens.items()}
