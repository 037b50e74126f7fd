"""Mixed traffic without mercy: every drafter and sampling parameter, cancels, deadlines, nonsense, a crowded queue."""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from adaptive_spec.core import FinishedRequest, Request, SamplingParams
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.decoding.stream import Stream
from adaptive_spec.errors import BusyError, RequestError
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.settings import DecoderSettings

SETTINGS = DecoderSettings(
    slots=4,
    max_context_tokens=128,
    prefill_chunk_tokens=16,
    max_chain_length=4,
    explore_share=0.2,
    queue_limit=24,
    request_timeout_seconds=60.0,
    answer_cache_tokens=1_000,
    ngram_store_tokens=300,
)
_BAD = (
    {"temperature": -1.0},
    {"top_p": 0.0},
    {"max_tokens": 0},
    {"max_tokens": 10_000},
    {"chain_length": 99},
    {"drafter": "oracle"},
    {"n": 0},
    {"logprobs": 21},
    {"deadline_seconds": -1.0},
    {"min_p": 2.0},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": 5e-324},
)


@dataclass
class Report:
    """What became of the requests."""

    refused: Counter[str] = field(default_factory=Counter)  # by error
    ended: Counter[str] = field(default_factory=Counter)  # choices by finish reason
    recorded: Counter[str] = field(default_factory=Counter)  # the same, as listeners heard it
    policies: Counter[str] = field(default_factory=Counter)
    num_asked: int = 0
    num_answered: int = 0
    resident_bytes: list[int] = field(default_factory=list)  # in order of time

    @property
    def growth_bytes(self) -> int:
        """By how much the peak of the last quarter exceeds that of the one before."""
        quarter = len(self.resident_bytes) // 4
        return max(self.resident_bytes[-quarter:]) - max(self.resident_bytes[-2 * quarter : -quarter])


def stress(pair: ModelPair, prompts: list[tuple[int, ...]], num_requests: int, seed: int = 0) -> Report:
    """Serve ``num_requests`` mixed requests and check what must hold whatever happens."""
    report, rng = Report(), random.Random(seed)
    threads_before = {thread.name for thread in threading.enumerate()}

    def hear(row: FinishedRequest) -> None:
        report.recorded[row.finish_reason] += 1
        report.policies[row.policy] += 1

    engine = Engine(pair, SETTINGS, Listeners(on_finish=hear, trace_top_k=4))
    engine.start()
    wanted = engine.submit(Request("before", prompts[0], SamplingParams(max_tokens=16, record=False))).collect()[1]
    open_streams: list[Stream] = []
    for number in range(num_requests):
        request = _request(rng, number, prompts)
        report.num_asked += 1
        try:
            open_streams.append(_submit(engine, request, rng))
        except (RequestError, BusyError) as error:
            report.refused[type(error).__name__] += 1
        while len(open_streams) > 16:
            _end(report, open_streams.pop(rng.randrange(len(open_streams))), rng)
        if number % max(1, num_requests // 100) == 0:
            report.resident_bytes.append(_resident_bytes())
    while open_streams:
        _end(report, open_streams.pop(), rng)
    _wait_for(lambda: engine.num_active == 0 and engine.queue_depth == 0)
    after = Request("after", prompts[0], SamplingParams(max_tokens=16, record=False))
    assert engine.submit(after).collect()[1] == wanted, "the caches are not what they were"
    engine.stop()
    _wait_for(lambda: {thread.name for thread in threading.enumerate()} == threads_before)
    assert report.num_asked == report.num_answered + report.refused.total()
    assert report.recorded.total() == report.ended.total() + 2, "each choice is recorded once"
    assert not report.ended["error"], "nothing may fail"
    assert engine.num_listener_failures == 0
    return report


def _request(rng: random.Random, number: int, prompts: list[tuple[int, ...]]) -> Request:
    if rng.random() < 0.15:
        return Request(f"r{number}", rng.choice(prompts[:4]), SamplingParams(max_tokens=10), "repeated")
    changes = dict(rng.choice(_BAD)) if rng.random() < 0.1 else {}
    params: dict[str, object] = {
        "max_tokens": rng.choice([1, 3, 10, 30, 60]),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.2]),
        "top_k": rng.choice([0, 0, 5]),
        "top_p": rng.choice([1.0, 0.9]),
        "min_p": rng.choice([0.0, 0.05]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.5]),
        "seed": rng.choice([None, number]),
        "stop": rng.choice([(), (), ("e",), ("xyz", "\n")]),
        "ignore_eos": rng.random() < 0.5,
        "drafter": rng.choice([None, "model", "ngram", "combined"]),
        "chain_length": rng.choice([None, None, 0, 1, 4]),
        "record": rng.random() < 0.8,
        "n": rng.choice([1, 1, 1, 2, 3]),
        "logprobs": rng.choice([None, None, 0, 5]),
        "deadline_seconds": rng.choice([None] * 6 + [30.0, 0.001, 0.2]),
    }
    domain = rng.choice(["flood", "flood", "flood", "quiet", f"rare-{number % 10}"])
    return Request(f"r{number}", rng.choice(prompts), SamplingParams(**(params | changes)), domain)  # type: ignore[arg-type]


def _submit(engine: Engine, request: Request, rng: random.Random) -> Stream:
    """Submit; a full queue is waited for, save now and then."""
    patient = rng.random() < 0.9
    while True:
        try:
            return engine.submit(request)
        except BusyError:
            if not patient:
                raise
            time.sleep(0.002)


def _end(report: Report, stream: Stream, rng: random.Random) -> None:
    if rng.random() < 0.2:
        stream.cancel()
    for text, tokens, last in stream.collect_all():
        assert last.usage is not None and last.finish_reason is not None
        assert last.usage.completion_tokens == len(tokens)
        assert (last.error is not None) == (last.finish_reason in ("deadline", "error"))
        assert text or not tokens or last.finish_reason != "length" or stream.request.params.stop or len(tokens) < 60
        report.ended[last.finish_reason] += 1
    report.num_answered += 1


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
