"""Repeated greedy requests are answered out of the cache, and nothing else is."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from adaptive_spec.core import Release, Request, SamplingParams
from adaptive_spec.decoding.answers import AnswerCache
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.slot import Delta
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings
from tests.decoding.heard import Heard

SETTINGS = DecoderSettings(
    slots=2, max_context_tokens=128, max_chain_length=4, queue_limit=3, answer_cache_tokens=2_000
)
GREEDY = SamplingParams(max_tokens=12)


@pytest.fixture
def engine(pair: ModelPair, heard: Heard) -> Iterator[Engine]:
    engine = Engine(pair, SETTINGS, heard.listeners)
    engine.start()
    yield engine
    engine.stop()


def cached(engine: Engine, request: Request) -> bool:
    usage = engine.submit(request).collect()[2].usage
    assert usage is not None
    return usage.cached


def test_a_repetition_gives_the_same_answer_without_a_step(engine: Engine, heard: Heard) -> None:
    params = replace(GREEDY, logprobs=2)
    first = engine.submit(Request("a", (1, 2, 3), params)).collect()
    deltas = list(engine.submit(Request("warm", (1, 2, 3), params)).events())
    num_steps = len(heard.steps)
    engine.swap(LoadedRelease(Release(version=4))).result()  # the draft decides nothing of what is said
    other = replace(params, seed=5, top_k=3, drafter="ngram", chain_length=1)
    again = engine.submit(Request("b", (1, 2, 3), other, domain="elsewhere")).collect()
    assert again[:2] == first[:2] and again[2].finish_reason == first[2].finish_reason
    assert len(deltas) == 1 and len(deltas[0].log_probs) == len(first[1])
    usage = again[2].usage
    assert usage is not None and usage.cached and usage.num_steps == 0
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, len(first[1]))
    engine.swap(LoadedRelease()).result()
    assert len(heard.steps) == num_steps
    row = heard.finished[-1]
    assert (row.policy, row.domain, row.releases, row.num_steps, row.decode_seconds) == (
        "cache", "elsewhere", (4,), 0, 0.0
    )  # fmt: skip
    assert [request.policy for request in heard.finished] == ["policy", "cache", "cache"]


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 11},
        {"temperature": 0.5},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"stop": ("q",)},
        {"ignore_eos": True},
        {"logprobs": 0},
    ],
)
def test_what_changes_the_answer_is_decoded(engine: Engine, change: dict[str, Any]) -> None:
    assert not cached(engine, Request("a", (1, 2, 3), GREEDY))
    assert not cached(engine, Request("b", (1, 2, 3), replace(GREEDY, **change)))
    assert not cached(engine, Request("c", (1, 2, 4), GREEDY))
    assert cached(engine, Request("d", (1, 2, 3), GREEDY))


def test_answers_of_another_target_are_not_given() -> None:
    request = Request("a", (1,), GREEDY)
    mine, other = AnswerCache(100, "one target"), AnswerCache(100, "another")
    mine.listening(request, lambda _: None)(Delta("x", [7], "stop"))
    assert mine.find(request) is not None and other.find(request) is None
    other._answers = mine._answers
    assert other.find(request) is None


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (GREEDY, "cancelled"),
        (GREEDY, "deadline"),
        (GREEDY, "error"),
        (replace(GREEDY, record=False), "stop"),
        (replace(GREEDY, temperature=1.0), "stop"),
    ],
)
def test_what_is_not_whole_not_greedy_or_not_to_be_recorded_is_not_kept(params: SamplingParams, reason: str) -> None:
    answers, passed = AnswerCache(100, ""), []
    request = Request("a", (1,), params)
    answers.listening(request, passed.append)(Delta("x", [7], reason))
    assert len(passed) == 1 and answers.num_tokens == 0 and answers.find(request) is None


def test_the_least_recently_used_make_room() -> None:
    answers = AnswerCache(10, "")
    requests = [Request(str(i), (i, i), GREEDY) for i in range(4)]

    def hear(request: Request, num_tokens: int) -> None:
        answers.listening(request, lambda _: None)(Delta("x", [7] * num_tokens, "length"))

    for request in requests[:2]:
        hear(request, 3)
    assert answers.num_tokens == 10
    assert answers.find(requests[0]) is not None
    hear(requests[2], 2)
    assert [answers.find(request) is not None for request in requests] == [True, False, True, False]
    hear(requests[2], 2)
    assert answers.num_tokens == 9
    hear(requests[3], 9)
    assert answers.find(requests[3]) is None and answers.num_tokens == 9


def test_a_full_queue_does_not_keep_an_answer_back(engine: Engine) -> None:
    assert not cached(engine, Request("a", (1, 2, 3), GREEDY))
    long = SamplingParams(max_tokens=100, ignore_eos=True, chain_length=0)
    running = [engine.submit(Request(f"long-{i}", (i,), long)) for i in range(2)]
    while engine.num_active < 2:
        time.sleep(0.001)
    waiting = [engine.submit(Request(f"waiting-{i}", (i,), long)) for i in range(3)]
    assert cached(engine, Request("b", (1, 2, 3), GREEDY))
    assert engine.queue_depth == 3
    for stream in (*running, *waiting):
        stream.cancel()
        assert stream.collect()[2].finish_reason == "cancelled"


def test_off_by_default(pair: ModelPair) -> None:
    assert DecoderSettings().answer_cache_tokens == 0
    engine = Engine(pair, SETTINGS.model_copy(update={"answer_cache_tokens": 0}))
    engine.start()
    assert not any(cached(engine, Request(str(i), (1, 2, 3), GREEDY)) for i in range(2))
    engine.stop()
