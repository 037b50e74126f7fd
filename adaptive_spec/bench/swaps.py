"""What an exchange of releases costs: the pause of decoding beside the steps before and after it.

A full batch decodes without end while another thread puts one release after another live.  Each changes every matrix
of the draft's layers by a random low-rank update of the size that training gives, so that no two share a draft and all
rows must rebuild their caches.  What the updates are worth does not matter here.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from adaptive_spec.bench.corpora import DOMAINS, prompts
from adaptive_spec.bench.ours import start_engine
from adaptive_spec.core import FinishedRequest, Release, Request, SamplingParams, Step
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import Settings

_SETTLED_STEPS = 4  # between two swaps
_WARM_UP_STEPS = 8
_PATIENCE_SECONDS = 120.0
_UPDATE_NORM = 0.01  # of a weight's own norm


@dataclass(slots=True)
class SwapTimes:
    """Seconds.  steps: of full batches, neither first after a swap nor beside a preparation."""

    rows: int
    steps: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    preparations: list[float] = field(default_factory=list)  # on the thread that swaps, while decoding goes on
    first_steps: list[float] = field(default_factory=list)  # after a swap: caches are rebuilt
    steps_beside: list[float] = field(default_factory=list)  # a preparation

    @property
    def longest_share(self) -> float:
        """p99 of the pause over the median step; at most 1 is the aim."""
        return float(np.percentile(self.pauses, 99) / np.median(self.steps))


@dataclass(frozen=True, slots=True)
class _Heard:
    """A step of the whole batch."""

    ended: float
    seconds: float
    rows: int
    release: int


class _Ear:
    """Hears each row of each step, and tells the steps apart."""

    def __init__(self) -> None:
        self.steps: list[_Heard] = []
        self._last: tuple[float, float] | None = None

    def on_step(self, step: Step) -> None:
        key = (step.draft_seconds, step.verify_seconds)
        if step.step_index and key != self._last:  # rows of one step share its times; a prompt is no step
            self._last = key
            self.steps.append(_Heard(time.perf_counter(), sum(key), step.batch_size, step.release))


def measure_swaps(
    pair: ModelPair, settings: Settings, swaps: int, rows: int, rank: int, tell: Callable[[int], None], seed: int = 0
) -> SwapTimes:
    """Swap so many times under a full batch and return what it took.

    Args:
        tell: hears the number of swaps done.
    """
    ear = _Ear()
    requests = _requests(pair, settings.decoder.max_context_tokens)
    stopping = threading.Event()

    def follow(_: FinishedRequest) -> None:
        if not stopping.is_set():
            engine.submit(next(requests))

    listeners = Listeners(ear.on_step, follow)
    engine = start_engine(pair, settings.decoder, {"slots": rows, "prefix_cache_tokens": 0}, listeners)
    times, preparing = SwapTimes(rows), list[tuple[float, float]]()
    try:
        for _ in range(rows):
            engine.submit(next(requests))
        _wait(engine, ear, _WARM_UP_STEPS)
        for index in range(swaps):
            loaded = LoadedRelease(Release(index + 1), _update(pair, rank, seed + index))
            began = time.perf_counter()
            pause = engine.swap(loaded)
            preparing.append((began, time.perf_counter()))
            times.pauses.append(pause.result())
            _wait(engine, ear, _SETTLED_STEPS)
            tell(index + 1)
    finally:
        stopping.set()
        engine.drain()
        engine.call(lambda: engine.decoder.end_all("cancelled"))
        engine.stop()
    times.preparations = [end - start for start, end in preparing]
    _sort(ear.steps[_WARM_UP_STEPS:], preparing, times)
    return times


def _requests(pair: ModelPair, context_tokens: int) -> Iterator[Request]:
    """Prompts of all domains in turn, each answered until the context is full."""
    texts = [pair.encode(prompt.text)[: context_tokens // 4] for name in DOMAINS for prompt in prompts(name)]
    for number, text in enumerate(itertools.cycle(texts)):
        params = SamplingParams(max_tokens=context_tokens - len(text), ignore_eos=True, chain_length=2, record=False)
        yield Request(f"swap-{number}", tuple(text), params)


def _update(pair: ModelPair, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """A low-rank change of every matrix of the draft's layers."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in pair.draft.named_parameters():
        if ".layers." not in name or weight.dim() != 2:
            continue
        up, down = (torch.randn(side, rank, generator=generator) for side in weight.shape)
        change = up @ down.T
        found[name] = change * (_UPDATE_NORM * float(weight.detach().norm()) / float(change.norm()))
    return found


def _wait(engine: Engine, ear: _Ear, steps: int) -> None:
    """Let the batch take so many steps."""
    wanted, deadline = len(ear.steps) + steps, time.monotonic() + _PATIENCE_SECONDS
    while len(ear.steps) < wanted:
        if time.monotonic() > deadline or not engine.alive:
            raise RuntimeError("the batch does not decode any more")
        time.sleep(0.001)


def _sort(steps: list[_Heard], preparing: list[tuple[float, float]], times: SwapTimes) -> None:
    release = None
    for step in steps:
        began = step.ended - step.seconds
        first, release = step.release != release, step.release
        if step.rows < times.rows:
            continue
        if first:
            times.first_steps.append(step.seconds)
        elif any(start < step.ended and began < end for start, end in preparing):
            times.steps_beside.append(step.seconds)
        else:
            times.steps.append(step.seconds)
