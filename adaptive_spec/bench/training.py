"""``adaptive-spec bench-training``: what a training step costs beside the forward and backward of the model alone.

A step as a run takes it and a bare pass over the same batch take turns, so that whatever else the machine does slows
both.  Trains an adapter on recorded traces and throws it away.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import PreTrainedModel

from adaptive_spec.bench.progress import Teller
from adaptive_spec.core import Trace
from adaptive_spec.errors import NotEnoughDataError
from adaptive_spec.learning.batches import make_batch
from adaptive_spec.learning.distil import Distillation
from adaptive_spec.learning.memory import KEEP_FREED_MEMORY, memory_bytes
from adaptive_spec.learning.run import PAUSE_NAME, RunTeller
from adaptive_spec.learning.selection import split
from adaptive_spec.learning.throughput import bare_seconds
from adaptive_spec.models.loading import load_pair
from adaptive_spec.records.database import Database
from adaptive_spec.records.runs import create_run
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import LearningSettings, Settings

_WARM_UP = 2  # pairs that are not counted


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds by the clock, and of this process on a core: others' load is in the first alone."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step and the bare pass over its batches.  memory_bytes: that the process holds afterwards, if known."""

    num_tokens: int
    bare: Timing
    step: Timing
    memory_bytes: int | None


def bench_training(settings: Settings, num_steps: int, title: str = "bench-training") -> list[StepCost]:
    """Measure in a process like that of a run: its threads, and memory that stays with it when freed.

    Raises:
        NotEnoughDataError: fewer than two traces to train on.
        AdaptiveSpecError: the database or a model cannot be used.
    """
    threads = {"OMP_NUM_THREADS": str(settings.learning.threads)}
    with (
        _environment({**KEEP_FREED_MEMORY, **threads}),
        ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process,
    ):
        return process.submit(_measure_recorded, settings, num_steps, title).result()


def measure(
    draft: PreTrainedModel,
    traces: Sequence[Trace],
    selection: Sequence[Trace],
    learning: LearningSettings,
    folder: Path,
    num_steps: int,
    tell: Teller,
    title: str = "bench-training",
) -> list[StepCost]:
    """Take ``num_steps`` steps over epoch after epoch, telling progress to a database and leaving checkpoints as a run.

    Evaluations between epochs are left out, as they are in a run's ``throughput_share``.

    Args:
        folder: an empty one; it gets the database and the checkpoint.
    """
    database = Database(f"sqlite:///{folder / 'run.db'}")
    try:
        database.upgrade()
        run_tell = RunTeller(database, create_run(database, title, {}), folder / PAUSE_NAME)
        run = Distillation(draft, traces, selection, learning, run_tell, None, folder, ())
        run.begin()
        run.model.train()
        costs = []
        for number, batches in enumerate(islice(_steps(run), _WARM_UP + num_steps)):
            costs.append(_cost(run, batches, bare_first=number % 2 == 0))
            tell(title, f"step {number + 1} of {_WARM_UP + num_steps}")
        return costs[_WARM_UP:]
    finally:
        database.close()


def _measure_recorded(settings: Settings, num_steps: int, title: str) -> list[StepCost]:
    torch.set_num_threads(settings.learning.threads)
    database = Database(settings.records.url)
    try:
        store = TraceStore(database, settings.records.folder, settings.records.held_out_share)
        traces, selection = split(store.load(held_out=False))
    finally:
        database.close()
    if not traces or not selection:
        raise NotEnoughDataError(
            "There are not two recorded traces to train on. Serve more requests, or name --traces."
        )
    draft = load_pair(settings.model).draft
    with tempfile.TemporaryDirectory() as folder:
        return measure(draft, traces, selection, settings.learning, Path(folder), num_steps, Teller(sys.stderr), title)


def _steps(run: Distillation) -> Iterator[list[list[Trace]]]:
    for epoch in count(1):
        yield from run.plan(epoch)


def _cost(run: Distillation, batches: Sequence[Sequence[Trace]], bare_first: bool) -> StepCost:
    ready = [make_batch(traces, run.draft.device) for traces in batches]

    def bare() -> Timing:
        began = time.process_time()
        seconds = sum(bare_seconds(run.draft, batch) for batch in ready)
        return Timing(seconds, time.process_time() - began)

    def step() -> Timing:
        began, began_cpu = time.perf_counter(), time.process_time()
        run.step(batches)
        return Timing(time.perf_counter() - began, time.process_time() - began_cpu)

    first, second = (bare(), step()) if bare_first else (step(), bare())
    its_bare, its_step = (first, second) if bare_first else (second, first)
    return StepCost(sum(batch.num_tokens for batch in ready), its_bare, its_step, memory_bytes())


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Let processes that begin within see these variables; the allocator reads its own only then."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
