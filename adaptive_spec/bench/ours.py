"""Our sides: each an engine of its own per shape, listened to."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from adaptive_spec.bench.sides import DecodePhase, OurSide, Task, Turn
from adaptive_spec.calibration.cost import CostModel, cost_key
from adaptive_spec.core import FinishedRequest, Release, Request, SamplingParams, Step
from adaptive_spec.decoding.decoder import Decoder
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.records.writer import Writer
from adaptive_spec.settings import DecoderSettings, RecordSettings, Settings, VerificationSettings

_COST_CONTEXT_TOKENS = 256
_POLICY_WARM_UP_TOKENS = 40  # enough chains to know how they fare
T = TypeVar("T")


class Recorder:
    """Records everything as the service does, into a folder that goes away."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        root = Path(self._folder.name)
        records = RecordSettings(url=f"sqlite:///{root}/bench.db", folder=root / "traces")
        self._database = Database(records.url)
        self._database.upgrade()
        self._writer = Writer(
            self._database, TraceStore(self._database, records.folder, records.held_out_share), records
        )
        self.listeners = Listeners(
            self._writer.on_step, self._writer.on_finish, self._writer.on_trace, trace_top_k=records.trace_top_k
        )

    def close(self) -> None:
        """Write out what waits and remove the folder."""
        self._writer.close()
        self._database.close()
        self._folder.cleanup()


class OurRunner:
    """One of our sides.  Its engines share the pair; n-gram memories and policies are each engine's own.

    The rounds repeat their prompts, so no answer may be remembered: requests ask not to be recorded unless the side
    records, and that side does not look anything up.

    Args:
        prepare: what is done to the decoder of a new engine before anything is decoded.
    """

    def __init__(
        self,
        side: OurSide,
        pair: ModelPair,
        settings: DecoderSettings,
        release: Release,
        cost: CostModel,
        prepare: Callable[[Decoder], None] = lambda decoder: None,
    ) -> None:
        self._side = side
        self._pair = pair
        self._settings = settings
        self._release = release
        self._cost = cost
        self._prepare = prepare
        self._recorder = Recorder() if side.recorded else None
        self._ear = _Ear(self._recorder.listeners if self._recorder else Listeners())
        self._engines: dict[tuple[int, int], Engine] = {}
        self._num_turns = 0

    def refusal(self, task: Task) -> str | None:
        """None: our engine takes any task."""
        return None

    def run(self, task: Task) -> Turn:
        """Submit all prompts at once and wait for all answers."""
        engine = self._engine(len(task.prompts), task.context_tokens)
        learns = task.warms_up and self._side.chooses
        params = SamplingParams(
            max_tokens=max(_POLICY_WARM_UP_TOKENS, task.max_tokens) if learns else task.max_tokens,
            ignore_eos=task.ignore_eos,
            record=self._side.recorded,
            **self._side.params,
        )
        self._num_turns += 1
        requests = [
            Request(f"{self._side.name}-{self._num_turns}-{row}", ids, params, task.domain)
            for row, ids in enumerate(task.prompts)
        ]
        self._ear.forget()
        began = time.perf_counter()
        streams = [engine.submit(request) for request in requests]
        tokens = [stream.collect()[1] for stream in streams]
        seconds = time.perf_counter() - began
        engine.call(lambda: None).result()  # comes after the last step, so that all of it has been heard
        return self._ear.turn(tokens, seconds)

    def close(self) -> None:
        """End the engines' threads."""
        for engine in self._engines.values():
            engine.stop()
        if self._recorder:
            self._recorder.close()

    def _engine(self, slots: int, context_tokens: int) -> Engine:
        if (slots, context_tokens) not in self._engines:
            shape = {
                "slots": slots,
                "max_context_tokens": max(128, context_tokens + _POLICY_WARM_UP_TOKENS),
                "prefix_cache_tokens": 0,  # rounds repeat their prompts
            }
            engine = start_engine(self._pair, self._settings, {**shape, **self._side.decoder}, self._ear.listeners)
            engine.call(lambda: self._prepare(engine.decoder)).result()
            engine.price(self._cost)
            # The release's weights are in the draft already.
            engine.swap(LoadedRelease(self._release)).result()
            self._engines[slots, context_tokens] = engine
        return self._engines[slots, context_tokens]


def start_engine(
    pair: ModelPair,
    settings: DecoderSettings,
    changes: Mapping[str, Any],
    listeners: Listeners | None = None,
    verification: VerificationSettings | None = None,
) -> Engine:
    """Start an engine with changed settings, on as many threads as the caller."""
    changed = DecoderSettings(**{**settings.model_dump(), **changes})
    engine = Engine(pair, changed, listeners, verification=verification)
    engine.start()
    threads = torch.get_num_threads()
    engine.call(lambda: torch.set_num_threads(threads)).result()
    return engine


def measured_cost(pair: ModelPair, settings: Settings, rows: int, vocabulary: Sequence[int] | None) -> CostModel:
    """What a step costs here, as the service measures it when it starts."""
    engine = start_engine(pair, settings.decoder, {"slots": rows, "max_context_tokens": _COST_CONTEXT_TOKENS})
    engine.swap(LoadedRelease(Release(vocabulary=None if vocabulary is None else tuple(vocabulary)))).result()
    key = cost_key(
        target=settings.model.target,
        draft=pair.hashes["draft"][:12],
        dtype=settings.model.dtype,
        device=settings.model.device,
        threads=torch.get_num_threads(),
        batch_size=1,
    )
    try:
        return engine.measure_cost(key)
    finally:
        engine.stop()


class _Ear:
    """Hears an engine's steps and passes them on."""

    def __init__(self, others: Listeners) -> None:
        self._heard: list[tuple[float, Step]] = []
        self._first_tokens: list[float] = []
        self.listeners = replace(
            others, on_step=_both(self._on_step, others.on_step), on_finish=_both(self._on_finish, others.on_finish)
        )

    def forget(self) -> None:
        """Begin a new turn."""
        self._heard, self._first_tokens = [], []

    def turn(self, tokens: list[list[int]], seconds: float) -> Turn:
        """What was heard since the last ``forget``."""
        first = sorted(self._first_tokens)[len(self._first_tokens) // 2]
        return Turn(
            tokens,
            seconds,
            first,
            len(self._heard),
            decode_phase(self._heard, len(tokens)),
            sum(step.chain_length for _, step in self._heard),
        )

    def _on_step(self, step: Step) -> None:
        self._heard.append((time.perf_counter(), step))

    def _on_finish(self, finished: FinishedRequest) -> None:
        self._first_tokens.append(finished.time_to_first_token_seconds)


def decode_phase(heard: list[tuple[float, Step]], num_rows: int) -> DecodePhase:
    """What was heard after every row had a token.

    A step of a batch is heard once per row, each time with the seconds of the whole step.
    """
    steps: list[list[tuple[float, Step]]] = []
    seen: set[str] = set()
    began = 0
    while began < len(heard):
        rows = heard[began : began + heard[began][1].batch_size]
        began += len(rows)
        if len(seen) < num_rows:
            steps = []  # some row waits for its first token: the phase begins with this step's end at the earliest
        seen |= {step.request_id for _, step in rows}
        steps.append(rows)
    first, *counted = steps
    if not counted:
        return DecodePhase()
    return DecodePhase(
        num_tokens=sum(step.num_emitted for rows in counted for _, step in rows),
        seconds=counted[-1][-1][0] - first[-1][0],
        draft_seconds=sum(rows[0][1].draft_seconds for rows in counted),
        verify_seconds=sum(rows[0][1].verify_seconds for rows in counted),
    )


def _both(first: Callable[[T], None], second: Callable[[T], None]) -> Callable[[T], None]:
    def call(value: T) -> None:
        first(value)
        second(value)

    return call
