"""``adaptive-spec bench``: all sides in one process, taking turns at the same prompts with the same weights.

The sides' order changes with every turn, so that a machine that slows down or warms up favours nobody.  Each turn is
also compared with plain decoding in that very turn, which takes out what the machine did meanwhile.
"""

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import transformers.utils.logging

from adaptive_spec.bench.lossless import is_tie
from adaptive_spec.bench.ours import OurRunner, measured_cost
from adaptive_spec.bench.peers import peer_runners
from adaptive_spec.bench.sides import OURS, PEERS, PLAIN, REFERENCE, OurSide, Runner, Task, Turn
from adaptive_spec.bench.workloads import Plan, Workload, domain_workloads, growth_workloads
from adaptive_spec.core import Release, StepCost
from adaptive_spec.errors import SettingsError
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.models.weights import LoadedRelease, merge_into
from adaptive_spec.releases.adapter import load_adapter_delta
from adaptive_spec.releases.bundle import bundle_name, read_bundle
from adaptive_spec.settings import DecoderSettings, Settings

logger = logging.getLogger(__name__)

_WARM_UP_PROMPT, _WARM_UP_TOKENS = 64, 4
_BEST = 2  # speculating sides of ours that the growth part measures

Tell = Callable[[str, str], None]


@dataclass(slots=True)
class Cell:
    """One side on one workload: its turns, plain decoding's in the same turns, and how its answers compared.

    An answer is identical when it is both plain decoding's and that of transformers' ``generate``; a tie when it parts
    from them where the target's two best logits are equal within its precision.
    """

    side: str
    workload: Workload
    turns: list[Turn] = field(default_factory=list)
    plain: list[Turn] = field(default_factory=list)
    num_identical: int = 0
    num_ties: int = 0
    skipped: str | None = None

    @property
    def num_answers(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def ratios(self) -> list[float]:
        return [
            mine.tokens_per_second / its.tokens_per_second for mine, its in zip(self.turns, self.plain, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured: every cell, and the cost of a step by which our n-gram chains and policies were priced."""

    cells: list[Cell]
    cost: StepCost


def compare(
    settings: Settings,
    plan: Plan,
    *,
    release: str | None = None,
    adapter: Path | None = None,
    tell: Tell = lambda title, text: None,
) -> Comparison:
    """Load the models twice, ours and the peers', and measure the plan.

    Args:
        release: a version in ``releases.folder`` or the folder of a bundle; its adapter and thresholds are used.
        adapter: the folder of an adapter alone.
        tell: called with a title and how far it is.
    """
    torch.set_num_threads(settings.model.threads or torch.get_num_threads())
    tell("bench", "loading the models, twice")
    ours, theirs = load_pair(settings.model), load_pair(settings.model)
    running = put_on(settings, ours, theirs, release, adapter)
    said = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # its assisted generation warns of what it does itself
    try:
        return measure(ours, theirs, settings, plan, running, tell)
    finally:
        transformers.utils.logging.set_verbosity(said)


def put_on(
    settings: Settings, ours: ModelPair, theirs: ModelPair | None, release: str | None, adapter: Path | None
) -> Release:
    """Put a trained adapter on both drafts; return the release that our engines run.

    Args:
        theirs: None when nobody else decodes.

    Raises:
        SettingsError: both a release and an adapter.
        ReleaseError: either does not fit.
    """
    if release is not None and adapter is not None:
        raise SettingsError("A release brings its own adapter; give either --release or --adapter.")
    running = Release()
    if release is not None:
        folder = settings.releases.folder / bundle_name(int(release)) if release.isdigit() else Path(release)
        running = read_bundle(folder, draft=ours.draft, hashes=ours.hashes)
    elif adapter is not None:
        running = Release(version=1, adapter=str(adapter))
    if running.adapter is not None:
        loaded = LoadedRelease(deltas=load_adapter_delta(Path(running.adapter), ours.draft))
        for pair in (ours, theirs):
            if pair is not None:
                merge_into(pair.draft, loaded)
    return running


def measure(
    ours: ModelPair, theirs: ModelPair, settings: Settings, plan: Plan, release: Release, tell: Tell
) -> Comparison:
    """Measure the domains, then, in half as many rounds, how the cost grows.

    The growth part has plain decoding, our two best sides and transformers' ``generate``.
    """
    domains = domain_workloads(ours, plan)
    growth = growth_workloads(ours, plan) if plan.growth else []
    tell("bench", "measuring the cost of a step")
    cost = measured_cost(ours, settings, max(plan.batches), release.vocabulary)
    with ExitStack() as stack:
        runners: dict[str, Runner] = {
            side.name: OurRunner(side, ours, _decoder(settings, side), release, cost)
            for side in OURS
            if side.name in plan.sides
        }
        runners |= peer_runners(theirs, plan.sides)
        for runner in runners.values():
            stack.callback(runner.close)
        cells = take_turns(runners, domains, plan.rounds, theirs, partial(tell, "domains"))
        chosen = (PLAIN, *best_sides(cells, _BEST), REFERENCE)
        some = {name: runner for name, runner in runners.items() if name in chosen}
        cells += take_turns(some, growth, (plan.rounds + 1) // 2, theirs, partial(tell, "growth"))
    return Comparison(cells, cost.step)


def take_turns(
    runners: Mapping[str, Runner],
    workloads: Sequence[Workload],
    rounds: int,
    judge: ModelPair,
    tell: Callable[[str], None] = lambda text: None,
    plain: str = PLAIN,
) -> list[Cell]:
    """Let all sides do every task in turn, round by round; the first round warms up and is not counted.

    Args:
        judge: whose target says whether two answers part at a tie.
        plain: the side of plain decoding.
    """
    cells = [{name: Cell(name, workload) for name in runners} for workload in workloads]
    for number, tasks in enumerate(rounds_of(workloads, rounds)):
        title = f"round {number} of {rounds}" if number else "warm-up"
        for turn, (place, task) in enumerate(tasks):
            shown: dict[str, Turn] = {}
            # Counting on by the round, a task that comes at the same turn of each meets another order in each.
            for name in order(list(runners), number + turn):
                tell(f"{title}, turn {turn + 1} of {len(tasks)}: {task.domain}, {name}")
                _let(runners[name], task, cells[place][name], shown)
            if number:
                _note(cells[place], shown, task, judge, plain)
    return [cell for row in cells for cell in row.values()]


def rounds_of(workloads: Sequence[Workload], rounds: int) -> list[list[tuple[int, Task]]]:
    """The tasks of each round, with the place of their workload.  To warm up, a few tokens are enough."""
    tasks = [(place, task) for place, workload in enumerate(workloads) for task in workload.tasks]
    return [
        [(place, _shortened(workload.tasks[0])) for place, workload in enumerate(workloads)],
        *[tasks] * rounds,
    ]


def order(names: Sequence[str], turn: int) -> list[str]:
    """The sides' order in a turn: there, back again, and then from the next one on."""
    first = turn // 2 % len(names)
    rotated = [*names[first:], *names[:first]]
    return rotated[::-1] if turn % 2 else rotated


def best_sides(cells: Sequence[Cell], count: int) -> list[str]:
    """Our speculating sides with the largest median ratio to plain decoding over the domains."""
    ratios = {
        side.name: [ratio for cell in cells if cell.side == side.name for ratio in cell.ratios]
        for side in OURS
        if side.speculates
    }
    measured = {name: statistics.median(values) for name, values in ratios.items() if values}
    return sorted(measured, key=lambda name: -measured[name])[:count]


def _shortened(task: Task) -> Task:
    prompts = tuple(ids[-_WARM_UP_PROMPT:] for ids in task.prompts)
    return replace(task, prompts=prompts, max_tokens=min(_WARM_UP_TOKENS, task.max_tokens), warms_up=True)


def _decoder(settings: Settings, side: OurSide) -> DecoderSettings:
    """Chains as long as the side asks for must be allowed."""
    longest = max(settings.decoder.max_chain_length, side.params.get("chain_length") or 0)
    return settings.decoder.model_copy(update={"max_chain_length": longest})


def _let(runner: Runner, task: Task, cell: Cell, shown: dict[str, Turn]) -> None:
    cell.skipped = cell.skipped or runner.refusal(task)
    if cell.skipped is not None:
        return
    try:
        shown[cell.side] = runner.run(task)
    except Exception as error:
        if cell.side not in PEERS:
            raise
        # Other people's code must not cost the figures of the rest.
        logger.warning("%s failed and is left out", cell.side, exc_info=True)
        cell.skipped = f"failed: {error}"


def _note(cells: Mapping[str, Cell], shown: Mapping[str, Turn], task: Task, judge: ModelPair, plain: str) -> None:
    for name, turn in shown.items():
        cells[name].turns.append(turn)
        cells[name].plain.append(shown[plain])
        others = [shown[other] for other in (plain, REFERENCE) if other != name and other in shown]
        for row, prompt in enumerate(task.prompts):
            answer = turn.tokens[row]
            different = [other.tokens[row] for other in others if other.tokens[row] != answer]
            if not different:
                cells[name].num_identical += 1
            elif all(is_tie(judge, prompt, answer, other) for other in different):
                cells[name].num_ties += 1
