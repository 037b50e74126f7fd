"""``adaptive-spec frontier``: what a relaxed verifier's speed costs in divergence, per domain.

One recorded pass of exact decoding, every verifier replayed on it at every threshold, some points decoded for real.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adaptive_spec.bench.compare import put_on
from adaptive_spec.bench.corpora import DOMAINS, prompts, require_known
from adaptive_spec.bench.frontier_live import BATCH, Contest, Live, decode_live
from adaptive_spec.bench.frontier_record import Pass, record
from adaptive_spec.bench.frontier_replay import Point, best_within, frontier, sweep
from adaptive_spec.bench.ours import measured_cost
from adaptive_spec.bench.sandbox import Limits, why_refused
from adaptive_spec.bench.tasks import TaskSet, find_sets, missing_sets
from adaptive_spec.core import Release, StepCost
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.settings import Settings

_LIVE_SHARES = (0.02, 0.01, 0.05)  # of divergence, in the order in which points are chosen
_NEAR = 2.0  # a point further from one of them than this factor does not stand for it

Tell = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class FrontierPlan:
    """How much is measured.

    num_prompts, max_tokens: of each domain, recorded and decoded live.  timed_prompts: of them, for the seconds, in
    batches of ``batch``.  live: relaxed points decoded per domain; 0: none.  num_tasks: of each set; 0: none.
    """

    domains: tuple[str, ...] = DOMAINS
    num_prompts: int = 12
    max_tokens: int = 48
    chain_length: int = 6
    batch: int = 1
    timed_prompts: int = 2
    live: int = 3
    num_tasks: int = 12


_QUICK = {"domains": ("code", "math"), "num_prompts": 6, "max_tokens": 32, "live": 1, "num_tasks": 0}


def frontier_plan(*, quick: bool = False, **given: Any) -> FrontierPlan:
    """Return the default or the quick plan, changed by what was given; None and empty sequences change nothing.

    Raises:
        SettingsError: an unknown domain.
    """
    chosen = {name: value for name, value in given.items() if value not in (None, ())}
    made = FrontierPlan(**{**(_QUICK if quick else {}), **chosen})
    require_known(made.domains)
    return replace(made, timed_prompts=min(made.num_prompts, max(made.timed_prompts, made.batch)))


@dataclass(frozen=True, slots=True)
class Tasks:
    """Where the sets lie, and whether their programs may run where they cannot be locked in."""

    humaneval: Path | None = None
    gsm8k: Path | None = None
    unisolated: bool = False


@dataclass(slots=True)
class Frontier:
    """What was found.  points: every rule and length, by domain and verifier.  notes: what was left out, and why."""

    cost: StepCost
    recorded: Pass
    points: dict[str, dict[str, list[Point]]] = field(default_factory=dict)
    live: list[Live] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_frontier(
    settings: Settings,
    plan: FrontierPlan,
    *,
    release: str | None = None,
    tasks: Tasks | None = None,
    tell: Tell = lambda title, text: None,
) -> Frontier:
    """Load the models and measure the plan.

    Args:
        release: a version in ``releases.folder`` or the folder of a bundle.
        tell: called with a title and how far it is.
    """
    torch.set_num_threads(settings.model.threads or torch.get_num_threads())
    tell("frontier", "loading the models")
    pair = load_pair(settings.model)
    running = put_on(settings, pair, None, release, None)
    return measure_frontier(pair, settings, plan, running, tasks or Tasks(), tell)


def measure_frontier(
    pair: ModelPair, settings: Settings, plan: FrontierPlan, release: Release, tasks: Tasks, tell: Tell
) -> Frontier:
    """Measure the cost of a step, record, replay, and decode some points."""
    release = _without_rules(release)
    encoded = {
        domain: tuple(pair.encode(prompt.text) for prompt in prompts(domain)[: plan.num_prompts])
        for domain in plan.domains
    }
    longest = {"max_chain_length": plan.chain_length}
    settings = settings.model_copy(update={"decoder": settings.decoder.model_copy(update=longest)})
    tell("frontier", "measuring the cost of a step")
    cost = measured_cost(pair, settings, plan.batch, release.vocabulary).at(plan.batch)
    in_batches = settings.decoder.model_copy(update={"slots": BATCH})
    recorded = record(
        pair, in_batches, release, encoded, plan.max_tokens, plan.chain_length, partial(tell, "recording")
    )
    found = Frontier(cost, recorded)
    for domain, recording in recorded.recordings.items():
        tell("replaying", domain)
        found.points[domain] = sweep(recording, cost)
    sets = _task_sets(pair, plan, tasks, found.notes) if plan.live else []
    for domain in found.points if plan.live else ():
        own = tuple(task_set for task_set in sets if task_set.domain == domain)
        contest = Contest(domain, encoded[domain], plan.max_tokens, plan.timed_prompts, plan.batch, own)
        points = live_points(found.points[domain], plan.live)
        found.live += decode_live(pair, settings.decoder, release, contest, points, partial(tell, f"decoding {domain}"))
    return found


def live_points(points: Mapping[str, Sequence[Point]], count: int) -> list[Point]:
    """Exact speculation, and so many relaxed points that diverge by nearly 1, 2 or 5 %: the fastest verifiers first."""
    exact = best_within(points["exact"], 0.0)
    assert exact is not None
    ranked = [_near(points, share) for share in _LIVE_SHARES]
    chosen: list[Point] = []
    for place in range(len(points)):
        for near in ranked:
            if place < len(near) and near[place] not in chosen and len(chosen) < count:
                chosen.append(near[place])
    return [exact, *sorted(chosen, key=lambda point: point.divergence_share)]


def _near(points: Mapping[str, Sequence[Point]], share: float) -> list[Point]:
    """Of each relaxed verifier's frontier the point nearest to a share of divergence, by falling speed."""
    found = []
    for verifier, its in points.items():
        close = [p for p in frontier(its) if share / _NEAR <= p.divergence_share <= share * _NEAR]
        if verifier != "exact" and close:
            found.append(min(close, key=lambda point: abs(point.divergence_share - share)))
    return sorted(found, key=lambda point: -point.speed)


def _task_sets(pair: ModelPair, plan: FrontierPlan, tasks: Tasks, notes: list[str]) -> list[TaskSet]:
    """The sets that can be used; what cannot be is noted."""
    if not plan.num_tasks:
        return []
    for name in missing_sets({"humaneval": tasks.humaneval, "gsm8k": tasks.gsm8k}):
        notes.append(f"{name} is not there: pip install 'adaptive-spec[frontier]', or name its file with --{name}")
    limits = Limits(isolated=not tasks.unisolated)
    sets = find_sets(tasks.humaneval, tasks.gsm8k, num_cases=plan.num_tasks, pair=pair, limits=limits)
    refused = None if tasks.unisolated else why_refused()
    if refused is not None and any(task_set.name == "humaneval" for task_set in sets):
        notes.append(f"humaneval is left out, its programs are not run: {refused}; --unisolated runs them all the same")
        sets = [task_set for task_set in sets if task_set.name != "humaneval"]
    return sets


def _without_rules(release: Release) -> Release:
    """The release with its temperatures; its rules would go before those that are to be measured."""
    thresholds = {domain: replace(its, rule=None) for domain, its in release.thresholds.items()}
    return replace(release, thresholds=thresholds)
