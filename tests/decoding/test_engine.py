"""What befalls a request besides decoding: turns, deadlines, several choices, failures, the end of the service."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaptive_spec.core import Release, Request, SamplingParams
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.failures import is_out_of_memory
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.errors import (
    BusyError,
    DeadlineError,
    DecodingError,
    OwnDeadlineError,
    RequestError,
    UnavailableError,
)
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings
from tests.decoding.heard import Heard

SETTINGS = DecoderSettings(slots=3, max_context_tokens=400, prefill_chunk_tokens=7, max_chain_length=4)
LONG = SamplingParams(max_tokens=380, ignore_eos=True, chain_length=0)
SHORT = SamplingParams(max_tokens=20, ignore_eos=True)
OUT_OF_MEMORY = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to …"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 800 bytes."),
]


@pytest.fixture
def engine(pair: ModelPair, heard: Heard) -> Iterator[Engine]:
    engine = Engine(pair, SETTINGS, heard.listeners)
    yield engine
    engine.stop()


def alone(pair: ModelPair, prompt: tuple[int, ...], params: SamplingParams = SHORT) -> list[int]:
    """What the request says when nothing happens."""
    engine = Engine(pair, SETTINGS)
    engine.start()
    tokens = engine.submit(Request("alone", prompt, params)).collect()[1]
    engine.stop()
    return tokens


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---- turns


def test_a_domain_that_floods_the_queue_starves_no_other(pair: ModelPair, heard: Heard) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"slots": 1}), heard.listeners)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    streams = [engine.submit(Request(f"flood-{i}", (1, 2), params, "flood")) for i in range(30)]
    streams += [engine.submit(Request(f"quiet-{i}", (1, 2), params, "quiet")) for i in range(3)]
    engine.start()
    for stream in streams:
        stream.collect()
    engine.stop()
    order = [row.request_id for row in heard.finished]
    assert order[:7] == ["flood-0", "quiet-0", "flood-1", "quiet-1", "flood-2", "quiet-2", "flood-3"]


def test_an_id_that_waits_already_is_refused(engine: Engine) -> None:
    first = engine.submit(Request("same", (1,), SHORT))
    with pytest.raises(RequestError, match="own id"):
        engine.submit(Request("same", (2,), SHORT))
    engine.start()
    assert first.collect()[2].finish_reason == "length"


def test_cancelled_while_waiting_is_recorded(engine: Engine, heard: Heard) -> None:
    engine.submit(Request("a", (1, 2), SHORT)).cancel()
    (row,) = heard.finished
    assert (row.request_id, row.finish_reason, row.prompt_tokens) == ("a", "cancelled", 2)
    assert (row.num_steps, row.completion_tokens, row.decode_seconds) == (0, 0, 0.0)
    assert engine.queue_depth == 0


# ---- deadlines


def test_a_waiting_request_whose_time_is_up_takes_no_row(pair: ModelPair, heard: Heard) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"slots": 1}), heard.listeners)
    engine.start()
    running = engine.submit(Request("running", (1,), LONG))
    late = engine.submit(Request("late", (1,), SamplingParams(max_tokens=5, deadline_seconds=0.02)))
    _, tokens, last = late.collect()
    assert engine.num_active == 1, "it was refused while the row was still taken"
    assert tokens == [] and last.finish_reason == "deadline" and isinstance(last.error, OwnDeadlineError)
    assert "0.02 seconds" in str(last.error) and "deadline_seconds" in str(last.error)
    running.cancel()
    engine.stop()
    assert heard.reasons()["late"] == "deadline"
    assert not any(step.request_id == "late" for step in heard.steps)


def test_a_running_request_ends_with_what_it_has(pair: ModelPair, engine: Engine, heard: Heard) -> None:
    engine.start()
    neighbour = engine.submit(Request("neighbour", (4, 5), SHORT))
    began = time.monotonic()
    params = SamplingParams(max_tokens=380, ignore_eos=True, chain_length=0, deadline_seconds=0.2)
    text, tokens, last = engine.submit(Request("a", (1, 2), params)).collect()
    assert time.monotonic() - began < 5
    assert last.finish_reason == "deadline" and isinstance(last.error, OwnDeadlineError)
    assert 0 < len(tokens) < 380 and last.usage is not None and last.usage.completion_tokens == len(tokens)
    assert f"after {len(tokens)} tokens" in str(last.error)
    assert text == pair.tokenizer.decode(tokens)
    assert neighbour.collect()[1] == alone(pair, (4, 5))
    wait_for(lambda: engine.num_active == 0)
    assert heard.reasons() == {"a": "deadline", "neighbour": "length"}
    assert [trace.request_id for trace in heard.traces] == ["neighbour"]


def test_the_setting_is_the_default_and_the_longest(pair: ModelPair) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"request_timeout_seconds": 5.0}))
    asked = {None: 5.0, 2.0: 2.0, 60.0: 5.0}
    for own, wanted in asked.items():
        stream = engine.submit(Request(str(own), (1,), SamplingParams(deadline_seconds=own)))
        assert stream.request.params.deadline_seconds == wanted
    with pytest.raises(RequestError, match="deadline_seconds"):
        engine.submit(Request("x", (1,), SamplingParams(deadline_seconds=0.0)))
    engine.stop()


def test_whose_time_was_up_is_told(pair: ModelPair) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"request_timeout_seconds": 0.02}))
    engine.start()
    asked = ((0.01, OwnDeadlineError, "raise deadline_seconds"), (None, DeadlineError, "raise decoder.request_timeout"))
    for own, kind, advice in asked:
        params = SamplingParams(max_tokens=380, ignore_eos=True, chain_length=0, deadline_seconds=own)
        _, _, last = engine.submit(Request(str(own), (1, 2), params)).collect()
        assert type(last.error) is kind and advice in str(last.error)
    engine.stop()


# ---- several choices


def test_greedy_choices_are_equal_and_sampled_ones_are_not(pair: ModelPair, engine: Engine, heard: Heard) -> None:
    engine.start()
    greedy = engine.submit(Request("g", (1, 2), SamplingParams(max_tokens=20, ignore_eos=True, n=3))).collect_all()
    assert [tokens for _, tokens, _ in greedy] == [alone(pair, (1, 2))] * 3
    single = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=4, chain_length=0)
    params = replace(single, n=4)
    sampled, again = (engine.submit(Request(f"s{i}", (1, 2), params)).collect_all() for i in range(2))
    assert [tokens for _, tokens, _ in sampled] == [tokens for _, tokens, _ in again]
    assert len({tuple(tokens) for _, tokens, _ in sampled}) == 4
    assert sampled[0][1] == alone(pair, (1, 2), single)
    assert sorted(row.request_id for row in heard.finished)[:3] == ["g-0", "g-1", "g-2"]


def test_choices_are_cancelled_together_and_queued_all_or_none(pair: ModelPair) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"slots": 1, "queue_limit": 4}))
    many = SamplingParams(max_tokens=380, ignore_eos=True, chain_length=0, n=3)
    stream = engine.submit(Request("a", (1,), many))
    with pytest.raises(BusyError):
        engine.submit(Request("b", (1,), many))
    assert engine.queue_depth == 3
    engine.start()
    wait_for(lambda: engine.num_active == 1)
    stream.cancel()
    assert [last.finish_reason for _, _, last in stream.collect_all()] == ["cancelled"] * 3
    assert engine.queue_depth == 0
    for n in (0, 9):
        with pytest.raises(RequestError, match="n must lie"):
            engine.submit(Request("c", (1,), SamplingParams(n=n)))
    engine.stop()


# ---- failures


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["admit", "prefill"])
def test_out_of_memory_ends_one_request(
    pair: ModelPair, engine: Engine, heard: Heard, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    owner = engine.decoder if where == "admit" else engine.decoder.target_cache
    fine = getattr(owner, where)

    def scarce(*arguments: Any, **named: Any) -> Any:
        tokens = arguments[0].prompt_ids if where == "admit" else arguments[1]
        if 99 in tokens:
            raise error
        return fine(*arguments, **named)

    monkeypatch.setattr(owner, where, scarce)
    texts = [(1, 2, 3), (99, 4, 5), (6, 7, 8)]
    streams = [engine.submit(Request(str(i), prompt, SHORT)) for i, prompt in enumerate(texts)]
    engine.start()
    good, bad, last = (stream.collect() for stream in streams)
    assert bad[2].finish_reason == "error" and isinstance(bad[2].error, UnavailableError)
    assert "decoder.slots" in str(bad[2].error) and "decoder.max_context_tokens" in str(bad[2].error)
    assert (good[1], last[1]) == (alone(pair, texts[0]), alone(pair, texts[2]))
    assert heard.reasons()["1"] == "error"
    wait_for(lambda: engine.num_active == 0)


def test_out_of_memory_in_a_step_ends_the_youngest_row_only(
    pair: ModelPair, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, failures = engine.decoder.target_cache.forward, iter([True])

    def scarce(*arguments: Any, **named: Any) -> Any:
        if len(engine.decoder.slots) == 3 and next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*arguments, **named)

    monkeypatch.setattr(engine.decoder.target_cache, "forward", scarce)
    texts = [(1, 2, 3), (4, 5), (6, 7, 8)]
    streams = [engine.submit(Request(str(i), prompt, SHORT)) for i, prompt in enumerate(texts)]
    engine.start()
    first, second, youngest = (stream.collect() for stream in streams)
    assert youngest[2].finish_reason == "error" and isinstance(youngest[2].error, UnavailableError)
    assert (first[1], second[1]) == (alone(pair, texts[0]), alone(pair, texts[1]))


def test_what_counts_as_out_of_memory() -> None:
    assert all(is_out_of_memory(error) for error in OUT_OF_MEMORY)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_a_real_refusal_of_the_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_failing_text_ends_its_own_row(
    pair: ModelPair, engine: Engine, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [(1, 2, 3), (99, 4, 5), (6, 7, 8)]
    admit = engine.decoder.admit

    def admit_broken(request: Request, *rest: Any) -> None:
        admit(request, *rest)
        if 99 in request.prompt_ids:
            monkeypatch.setattr(engine.decoder.filling[-1].text, "_tokenizer", None)

    monkeypatch.setattr(engine.decoder, "admit", admit_broken)
    streams = [engine.submit(Request(str(i), prompt, SHORT)) for i, prompt in enumerate(texts)]
    engine.start()
    good, bad, last = (stream.collect() for stream in streams)
    assert bad[2].finish_reason == "error" and isinstance(bad[2].error, DecodingError)
    assert "NoneType" not in str(bad[2].error)
    assert (good[1], last[1]) == (alone(pair, texts[0]), alone(pair, texts[2]))
    wait_for(lambda: len(heard.finished) == 3)
    assert heard.reasons() == {"0": "length", "1": "error", "2": "length"}


@pytest.mark.parametrize("broken", ["on_step", "on_finish", "on_trace"])
def test_a_listener_that_raises_is_counted_and_decoding_goes_on(pair: ModelPair, broken: str) -> None:
    def raises(_: object) -> None:
        raise ValueError("the listener is broken")

    engine = Engine(pair, SETTINGS, Listeners(**{broken: raises}, trace_top_k=4))
    engine.start()
    streams = [engine.submit(Request(str(i), (i, 2), SHORT)) for i in range(3)]
    assert [stream.collect()[1] for stream in streams] == [alone(pair, (i, 2)) for i in range(3)]
    wait_for(lambda: engine.num_active == 0)
    engine.stop()
    assert engine.num_listener_failures >= 3


def test_a_step_that_fails_ends_its_requests_and_the_next_ones_are_served(
    pair: ModelPair, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(engine.decoder.proposer, "propose", lambda *_, **__: 1 / 0)
        stream = engine.submit(Request("a", (1,), SHORT))
        engine.start()
        last = stream.collect()[2]
    assert last.finish_reason == "error" and isinstance(last.error, DecodingError)
    assert isinstance(last.error.__cause__, ZeroDivisionError)
    assert engine.submit(Request("b", (1, 2), SHORT)).collect()[1] == alone(pair, (1, 2))


# ---- the end


def test_running_requests_finish_and_waiting_ones_are_refused(pair: ModelPair, heard: Heard) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"slots": 1, "drain_seconds": 60.0}), heard.listeners)
    engine.start()
    running = engine.submit(Request("running", (1,), SamplingParams(max_tokens=100, ignore_eos=True)))
    wait_for(lambda: engine.num_active == 1)
    waiting = engine.submit(Request("waiting", (1,), SHORT))
    engine.drain()
    refused = waiting.collect()[2]
    assert refused.finish_reason == "error" and isinstance(refused.error, UnavailableError)
    with pytest.raises(UnavailableError, match="shutting down"):
        engine.submit(Request("late", (1,), SHORT))
    engine.stop()
    assert running.collect()[2].finish_reason == "length"
    assert not engine.alive
    assert heard.reasons() == {"waiting": "error", "running": "length"}


def test_draining_is_bounded(pair: ModelPair, heard: Heard) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"drain_seconds": 0.05}), heard.listeners)
    engine.start()
    streams = [engine.submit(Request(str(i), (i,), LONG)) for i in range(5)]
    wait_for(lambda: engine.num_active == 3)
    began = time.monotonic()
    engine.stop()
    assert time.monotonic() - began < 5
    lasts = [stream.collect()[2] for stream in streams]
    assert [last.finish_reason for last in lasts] == ["cancelled"] * 3 + ["error"] * 2
    assert all(isinstance(last.error, UnavailableError) for last in lasts)
    assert engine.num_active == 0 and len(heard.finished) == 5
    engine.stop()


def test_an_engine_that_never_started_refuses_what_waits(pair: ModelPair) -> None:
    engine = Engine(pair, SETTINGS)
    stream = engine.submit(Request("a", (1,), SHORT))
    engine.stop()
    assert isinstance(stream.collect()[2].error, UnavailableError)
    assert "engine" not in {thread.name for thread in threading.enumerate()}


def test_what_is_asked_of_an_ended_engine_is_refused(pair: ModelPair) -> None:
    engine = Engine(pair, SETTINGS)
    engine.start()
    engine.stop()
    with pytest.raises(UnavailableError):
        engine.swap(LoadedRelease(Release(1))).result(timeout=5)
    with pytest.raises(UnavailableError):
        engine.submit(Request("a", (1,), SHORT))


def test_a_job_that_nobody_wants_any_more_is_not_done(pair: ModelPair, engine: Engine) -> None:
    done: list[int] = []
    unwanted = engine.call(lambda: done.append(1))
    assert unwanted.cancel()
    engine.start()
    assert engine.submit(Request("a", (1, 2), SHORT)).collect()[1] == alone(pair, (1, 2))
    assert not done


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_ends_the_thread_leaves_nobody_waiting(
    pair: ModelPair, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise SystemError("unforeseen")

    monkeypatch.setattr(engine, "_end_late", broken)
    stream = engine.submit(Request("a", (1, 2), SHORT))
    engine.start()
    assert isinstance(stream.collect()[2].error, UnavailableError)
    engine._thread.join()
    assert not engine.alive
    with pytest.raises(UnavailableError):
        engine.call(lambda: None).result(timeout=5)


def test_a_failure_after_a_prompt_is_whole_ends_that_step_only(
    pair: ModelPair, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(engine.decoder, "_leave", lambda row: 1 / 0)
        stream = engine.submit(Request("a", (1, 2), SamplingParams(max_tokens=1)))
        engine.start()
        assert stream.collect()[2].finish_reason == "length"
        engine.call(lambda: None).result()
    assert engine.submit(Request("b", (1, 2), SHORT)).collect()[1] == alone(pair, (1, 2))


def test_memory_of_the_prefix_caches_is_given_up_before_a_request_is(
    pair: ModelPair, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start()
    long = tuple(range(40))
    engine.submit(Request("first", long, SHORT)).collect()
    engine.call(lambda: None).result()
    assert engine.decoder.prefixes.num_tokens > 0
    forward, failures = engine.decoder.target_cache.forward, iter([True])

    def scarce(*arguments: Any, **named: Any) -> Any:
        if next(failures, False):
            raise MemoryError
        return forward(*arguments, **named)

    monkeypatch.setattr(engine.decoder.target_cache, "forward", scarce)
    assert engine.submit(Request("second", long, SHORT)).collect()[1] == alone(pair, long)
