"""``adaptive-spec bench-policies``: length policies taking turns in our decoder, so that only the policy differs.

Every side is an engine of ours with the same draft, release, prompts and cost of a step, and without exploring.  Nobody
learns while it is measured, save transformers' rule, which learns within each answer as it does at home.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from adaptive_spec.bench.compare import Cell, put_on, take_turns
from adaptive_spec.bench.ours import OurRunner, measured_cost
from adaptive_spec.bench.policy_proposers import LogisticProposer, SteadyProposer, TransformersProposer
from adaptive_spec.bench.sides import OurSide, Runner
from adaptive_spec.bench.workloads import Plan, domain_workloads
from adaptive_spec.calibration.logistic import Verification, learn_verification
from adaptive_spec.core import POOLED, Release, StepCost
from adaptive_spec.decoding.decoder import Decoder
from adaptive_spec.decoding.propose import Proposer
from adaptive_spec.errors import NotEnoughDataError
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.records.database import Database
from adaptive_spec.records.observations import Observations, observations, pool
from adaptive_spec.records.releases import same_draft
from adaptive_spec.settings import Settings

OFF = "off"
FIXED = {f"fixed {length}": length for length in (1, 2, 3, 4)}
POOLED_THRESHOLDS = "pooled thresholds"
TRANSFORMERS = "transformers"
TRANSFORMERS_CAPPED = "transformers capped"
LOGISTIC = "logistic"
OURS = ("threshold", "stopping")
SIDES = (OFF, *FIXED, TRANSFORMERS, TRANSFORMERS_CAPPED, LOGISTIC, POOLED_THRESHOLDS, *OURS)
_THEIR_LONGEST = 20  # transformers' num_assistant_tokens
_NEWEST_STEPS = 50_000

Tell = Callable[[str, str], None]
Make = Callable[[Proposer], Proposer]


@dataclass(slots=True)
class Policies:
    """What was measured.

    cost: of a step of so many rows, by which every side decides.  verification: what the logistic estimator learnt,
    from num_observations reached positions of earlier traffic.  skipped: sides that cannot run, and why.
    """

    cells: list[Cell]
    cost: StepCost
    verification: Verification | None
    num_observations: int
    skipped: dict[str, str] = field(default_factory=dict)


def compare_policies(
    settings: Settings,
    plan: Plan,
    database: Database,
    *,
    release: str,
    tell: Tell = lambda title, text: None,
) -> Policies:
    """Load the models and measure the plan, in batches of its first ``batches``.

    Args:
        database: holds the earlier traffic of the release, which the estimator learns from.
        release: a version in ``releases.folder`` or the folder of a bundle.
        tell: called with a title and how far it is.
    """
    torch.set_num_threads(settings.model.threads or torch.get_num_threads())
    tell("bench-policies", "loading the models")
    pair = load_pair(settings.model)
    running = put_on(settings, pair, None, release, None)
    return measure_policies(pair, settings, plan, running, _earlier(database, running.version), tell)


def measure_policies(
    pair: ModelPair,
    settings: Settings,
    plan: Plan,
    release: Release,
    earlier: Sequence[Observations],
    tell: Tell = lambda title, text: None,
) -> Policies:
    """Measure the cost of a step, let the estimator learn, and let all sides take turns."""
    batch = plan.batches[0]
    workloads = domain_workloads(pair, plan, batch)
    tell("bench-policies", "measuring the cost of a step")
    cost = measured_cost(pair, settings, batch, release.vocabulary)
    seen = pool(earlier)
    found = Policies([], cost.at(batch), None, len(seen.position))
    makers = _makers(found, seen, release, settings.decoder.max_chain_length)
    with ExitStack() as stack:
        runners: dict[str, Runner] = {}
        for name, make in makers.items():
            running = _pooled(release) if name == POOLED_THRESHOLDS else release
            side = _side(name, settings.decoder.max_chain_length)
            runner = OurRunner(side, pair, settings.decoder, running, cost, partial(_exchange, make))
            stack.callback(runner.close)
            runners[name] = runner
        found.cells = take_turns(runners, workloads, plan.rounds, pair, partial(tell, "turns"), OFF)
    return found


def _earlier(database: Database, version: int) -> list[Observations]:
    """What the draft of a release has shown, under whichever thresholds."""
    seen: list[Observations] = []
    for release in sorted(same_draft(database, version)):
        seen += observations(database, release=release, limit=_NEWEST_STEPS).values()
    return seen


def _makers(found: Policies, seen: Observations, release: Release, longest: int) -> dict[str, Make]:
    """What each side's engine proposes with; the sides that cannot run are noted."""
    makers: dict[str, Make] = dict.fromkeys(SIDES, SteadyProposer)
    makers[TRANSFORMERS] = makers[TRANSFORMERS_CAPPED] = TransformersProposer
    try:
        found.verification = learn_verification(seen, found.cost, longest)
        makers[LOGISTIC] = partial(LogisticProposer, plan=found.verification, step_cost=found.cost)
    except NotEnoughDataError as error:
        found.skipped[LOGISTIC] = f"release {release.version} has too little earlier traffic on record: {error}"
    if POOLED not in release.thresholds:
        found.skipped[POOLED_THRESHOLDS] = f"release {release.version} has no pooled thresholds"
    return {name: make for name, make in makers.items() if name not in found.skipped}


def _side(name: str, longest: int) -> OurSide:
    """What a side asks of requests, and how its decoder differs from the settings, whose longest chain is given."""
    length = 0 if name == OFF else FIXED.get(name)
    params = {"drafter": "model"} | ({} if length is None else {"chain_length": length})
    changes = {
        "explore_share": 0.0,
        "policy": "stopping" if name == "stopping" else "threshold",
        "max_chain_length": _THEIR_LONGEST if name == TRANSFORMERS else max(longest, length or 0),
    }
    return OurSide(name, params, changes)


def _pooled(release: Release) -> Release:
    """The release with its pooled thresholds for every domain."""
    return replace(release, thresholds={POOLED: release.thresholds[POOLED]})


def _exchange(make: Make, decoder: Decoder) -> None:
    decoder.proposer = make(decoder.proposer)
