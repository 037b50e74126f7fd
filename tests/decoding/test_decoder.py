"""Exact decoding: the draft decides speed, never content."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from adaptive_spec.calibration.cost import CostModel
from adaptive_spec.core import Release, Request, SamplingParams, StepCost, Thresholds
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.errors import BusyError, ReleaseError, RequestError
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings
from adaptive_spec.verification.distribution import Processing, processed_probs
from tests.decoding.heard import Heard

SETTINGS = DecoderSettings(slots=3, max_context_tokens=128, prefill_chunk_tokens=7, max_chain_length=4)


@pytest.fixture
def engine(pair: ModelPair, heard: Heard) -> Iterator[Engine]:
    engine = Engine(pair, SETTINGS, heard.listeners)
    engine.start()
    yield engine
    engine.swap(LoadedRelease()).result()
    engine.stop()


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(256) for _ in range(rng.randrange(1, 30))) for _ in range(count)]


def greedy_of_target(pair: ModelPair, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    output = pair.target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("chain_length", [0, 1, 4, None])
def test_greedy_equals_the_target_alone_in_a_ragged_batch(
    engine: Engine, pair: ModelPair, chain_length: int | None
) -> None:
    params = SamplingParams(max_tokens=25, chain_length=chain_length)
    streams = [engine.submit(Request(str(i), p, params)) for i, p in enumerate(prompts(8))]
    for prompt, stream in zip(prompts(8), streams, strict=True):
        assert stream.collect()[1] == greedy_of_target(pair, prompt, 25)


@pytest.mark.parametrize("drafter", ["ngram", "combined"])
@pytest.mark.parametrize("chain_length", [3, None])
def test_greedy_equals_the_target_alone_whoever_drafts(
    engine: Engine, heard: Heard, pair: ModelPair, drafter: str, chain_length: int | None
) -> None:
    """Prompts that repeat themselves, in a batch with rows that the model drafts for."""
    texts = [prompt * 2 for prompt in prompts(6)]
    for turn in range(2):  # the second time the outputs are remembered
        streams = [
            engine.submit(
                Request(
                    f"{turn}-{i}",
                    prompt,
                    SamplingParams(max_tokens=25, chain_length=chain_length, drafter=drafter if i % 3 else "model"),
                )
            )
            for i, prompt in enumerate(texts)
        ]
        for prompt, stream in zip(texts, streams, strict=True):
            assert stream.collect()[1] == greedy_of_target(pair, prompt, 25)
    lookups = [step for step in heard.steps if step.drafter == "ngram"]
    again = [step for step in lookups if step.request_id.startswith("1-")]
    assert sum(step.num_accepted for step in again) > 0.6 * sum(step.chain_length for step in again) > 0
    assert any(step.drafter == "model" for step in heard.steps)
    for step in heard.steps:
        assert (step.drafter == "") == (step.chain_length == 0)
        assert len(step.positions) == min(step.num_accepted + 1, step.chain_length)


def test_a_domain_may_have_a_drafter_of_its_own(pair: ModelPair, heard: Heard) -> None:
    settings = SETTINGS.model_copy(update={"domain_drafters": {"sql": "ngram"}})
    engine = Engine(pair, settings, heard.listeners)
    engine.start()
    text = prompts(1)[0] * 2
    for name, domain, drafter in (("1", "sql", None), ("2", "code", None), ("3", "sql", "model")):
        params = SamplingParams(max_tokens=20, chain_length=3, drafter=drafter)
        engine.submit(Request(name, text, params, domain)).collect()
    engine.stop()
    drafters = {name: {s.drafter for s in heard.steps if s.request_id == name} - {""} for name in "123"}
    assert drafters["1"] <= {"ngram"} and drafters["2"] == drafters["3"] == {"model"}


def test_outputs_of_requests_that_are_not_recorded_are_not_remembered(engine: Engine, heard: Heard) -> None:
    params = SamplingParams(max_tokens=25, chain_length=3, drafter="ngram", record=False)
    for turn in range(2):
        engine.submit(Request(str(turn), (5, 6, 7), params)).collect()
    first, second = ([s.chain_length for s in heard.steps if s.request_id == str(turn)] for turn in range(2))
    assert first == second


def test_domains_that_are_not_traced_keep_statistics_only(pair: ModelPair, heard: Heard) -> None:
    engine = Engine(pair, SETTINGS, replace(heard.listeners, untraced_domains=frozenset({"law"})))
    engine.start()
    for turn, domain in enumerate(("law", "law", "code")):
        params = SamplingParams(max_tokens=25, chain_length=3, drafter="ngram")
        engine.submit(Request(str(turn), (5, 6, 7), params, domain)).collect()
    engine.stop()
    assert {trace.domain for trace in heard.traces} == {"code"}
    assert {request.domain for request in heard.finished} == {"law", "code"}
    first, second = ([s.chain_length for s in heard.steps if s.request_id == str(turn)] for turn in range(2))
    assert first == second  # the first answer is not remembered for n-grams either


def test_n_gram_chains_are_only_as_long_as_pays(pair: ModelPair, heard: Heard) -> None:
    settings = SETTINGS.model_copy(update={"explore_share": 0.0, "drafter": "ngram"})
    engine = Engine(pair, settings, heard.listeners)
    engine.decoder.price(CostModel({1: StepCost(1.0, (1.0, 9.0, 9.0, 9.0, 9.0), "verifying chains never pays")}))
    engine.start()
    prompt = prompts(1)[0] * 3
    assert engine.submit(Request("a", prompt, SamplingParams(max_tokens=20))).collect()[1] == greedy_of_target(
        pair, prompt, 20
    )
    engine.stop()
    assert {step.chain_length for step in heard.steps} == {0}


def test_chains_are_accepted_and_outcomes_are_consistent(engine: Engine, heard: Heard) -> None:
    params = SamplingParams(max_tokens=30, chain_length=4)
    for i, prompt in enumerate(prompts(4)):
        usage = engine.submit(Request(str(i), prompt, params)).collect()[2].usage
        assert usage is not None and usage.num_accepted_draft_tokens > 0
    for step in heard.steps:
        assert len(step.positions) == min(step.num_accepted + 1, step.chain_length)
        assert [p.accepted for p in step.positions] == [i < step.num_accepted for i in range(len(step.positions))]
    emitted = sum(step.num_emitted for step in heard.steps)
    assert emitted == sum(f.completion_tokens for f in heard.finished)


def test_traces_hold_the_targets_own_distribution(engine: Engine, heard: Heard, pair: ModelPair) -> None:
    engine.submit(Request("a", prompts(1)[0], SamplingParams(max_tokens=20))).collect()
    engine.call(lambda: None).result()  # the step that ended the request is over
    (trace,) = heard.traces
    with torch.no_grad():
        log_probs = pair.target(torch.tensor([trace.tokens])).logits[0].log_softmax(-1)
    wanted = log_probs[trace.prompt_tokens - 1 : -1]
    ours = torch.from_numpy(trace.top_log_probs)
    assert torch.allclose(wanted.gather(1, torch.from_numpy(trace.top_ids).long()), ours, atol=1e-4)
    assert torch.allclose(1 - ours.exp().sum(-1), torch.from_numpy(trace.tail_mass), atol=1e-4)


def test_a_swap_in_mid_request_changes_no_token(engine: Engine, pair: ModelPair) -> None:
    prompt = prompts(1, seed=5)[0]
    stream = engine.submit(Request("long", prompt, SamplingParams(max_tokens=90, chain_length=3, ignore_eos=True)))
    name, parameter = next((n, p) for n, p in pair.draft.named_parameters() if "q_proj" in n)
    tokens: list[int] = []
    for index, delta in enumerate(stream.events()):
        tokens += delta.token_ids
        if index % 4 == 0:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
            engine.swap(LoadedRelease(Release(version=index + 1), {name: noise * 0.05}))
    usage = delta.usage
    assert usage is not None and len(usage.releases) > 1
    reference = pair.target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=90,
        min_new_tokens=90,
        do_sample=False,
        eos_token_id=None,
    )
    assert tokens == reference[0, len(prompt) :].tolist()


def test_the_draft_recovers_after_a_swap(engine: Engine, heard: Heard) -> None:
    """A swap to the same weights must not lower acceptance: the draft's cache is rebuilt."""
    params = SamplingParams(max_tokens=80, chain_length=3, ignore_eos=True)
    prompt = prompts(1, seed=5)[0]
    engine.submit(Request("plain", prompt, params)).collect()
    stream = engine.submit(Request("swapped", prompt, params))
    for index, _ in enumerate(stream.events()):
        if index == 5:
            engine.swap(LoadedRelease(Release(version=1))).result()
    plain, swapped = heard.finished
    assert swapped.num_accepted_draft_tokens == plain.num_accepted_draft_tokens


def test_a_bad_update_leaves_the_live_weights_alone(engine: Engine, pair: ModelPair) -> None:
    before = {name: p.clone() for name, p in pair.draft.named_parameters()}
    name = next(n for n in before if "q_proj" in n)
    for delta in (
        {name: torch.zeros(3, 3)},
        {"nowhere": torch.zeros(1)},
        {name: torch.full_like(before[name], torch.nan)},
    ):
        with pytest.raises(ReleaseError):
            engine.swap(LoadedRelease(Release(version=9), delta)).result()
    assert engine.release.version == 0
    assert all(torch.equal(before[n], p) for n, p in pair.draft.named_parameters())


def test_length_zero_is_obeyed_and_still_explored(pair: ModelPair, heard: Heard) -> None:
    settings = SETTINGS.model_copy(update={"explore_share": 0.3})
    engine = Engine(pair, settings, heard.listeners)
    engine.start()
    off = Release(version=1, thresholds={"slow": Thresholds(max_chain_length=0)})
    engine.swap(LoadedRelease(off)).result()
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    engine.submit(Request("a", prompts(1)[0], params, domain="slow")).collect()
    engine.stop()
    assert {step.chain_length for step in heard.steps if not step.explored} == {0}
    assert any(step.chain_length == 4 for step in heard.steps if step.explored)


@pytest.mark.parametrize(
    ("stop_below", "drafter", "explore_share"),
    [
        (0.0, "model", 0.0),
        (0.6, "model", 0.5),
        (0.0, "ngram", 0.5),
        (0.6, "combined", 0.0),
        # the other halves of the pairs
        pytest.param(0.0, "model", 0.5, marks=pytest.mark.slow),
        pytest.param(0.6, "model", 0.0, marks=pytest.mark.slow),
        pytest.param(0.0, "ngram", 0.0, marks=pytest.mark.slow),
        pytest.param(0.6, "combined", 0.5, marks=pytest.mark.slow),
    ],
)
def test_sampled_output_has_the_targets_distribution(
    pair: ModelPair, stop_below: float, drafter: str, explore_share: float
) -> None:
    """Chi-square of the second token over many seeds, for several length policies, drafters and mixed batches."""
    settings = DecoderSettings(
        slots=16,
        max_context_tokens=64,
        max_chain_length=3,
        explore_share=explore_share,
        queue_limit=4000,
        drafter=drafter,  # type: ignore[arg-type]
        ngram_min_match=1,
        ngram_trusted_match=1,
    )
    heard = Heard()
    engine = Engine(pair, settings, heard.listeners)
    engine.start()
    thresholds = {"*": Thresholds(stop_below=stop_below, max_chain_length=3)}
    engine.swap(LoadedRelease(Release(1, thresholds))).result()
    prompt, runs = (10, 20, 30), 1500
    params = [SamplingParams(max_tokens=4, temperature=0.8, top_k=5, seed=s, ignore_eos=True) for s in range(runs)]
    streams = [engine.submit(Request(str(s), prompt, p)) for s, p in enumerate(params)]
    samples = torch.tensor([stream.collect()[1] for stream in streams])
    engine.stop()
    assert heard_drafters(heard) >= ({"ngram"} if drafter != "model" else {"model"})
    for position in (1, 2):
        assert _chi_square_p(pair, prompt, samples, position) > 1e-4


def heard_drafters(heard: Heard) -> set[str]:
    return {step.drafter for step in heard.steps}


def _chi_square_p(pair: ModelPair, prompt: tuple[int, ...], samples: torch.Tensor, position: int) -> float:
    """p-value of tokens at ``position`` given the sampled prefix, by the probability integral over likely prefixes."""
    from scipy.stats import chisquare

    prefixes, inverse = samples[:, :position].unique(dim=0, return_inverse=True)
    observed: list[float] = []
    expected: list[float] = []
    processing = Processing.of([SamplingParams(temperature=0.8, top_k=5)])
    for index, prefix in enumerate(prefixes):
        drawn = samples[inverse == index, position]
        if len(drawn) < 40:
            continue
        with torch.no_grad():
            logits = pair.target(torch.tensor([[*prompt, *prefix.tolist()]])).logits[:, -1:]
        probs = processed_probs(logits, processing)[0, 0]
        for token in probs.nonzero().flatten().tolist():
            want = float(probs[token]) * len(drawn)
            if want >= 5:
                observed.append(float((drawn == token).sum()))
                expected.append(want)
    rest = max(float(sum(expected)) - sum(observed), 0.0)
    scaled = [e * sum(observed) / sum(expected) for e in expected]
    assert rest < 0.2 * sum(expected) and len(observed) > 3
    return float(chisquare(observed, scaled).pvalue)


def test_same_seed_same_output(engine: Engine) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    first, second = (engine.submit(Request(str(i), (1, 2, 3), params)).collect()[1] for i in range(2))
    assert first == second


def test_stop_strings_end_and_are_not_shown(engine: Engine, pair: ModelPair) -> None:
    prompt = prompts(1, seed=9)[0]
    text, _, _ = engine.submit(Request("a", prompt, SamplingParams(max_tokens=40))).collect()
    stop = text[5:8]
    cut, _, last = engine.submit(Request("b", prompt, SamplingParams(max_tokens=40, stop=(stop,)))).collect()
    assert cut == text[: text.index(stop)] and last.finish_reason == "stop"


def test_bad_requests_are_refused_and_others_go_on(engine: Engine) -> None:
    good = engine.submit(Request("good", (1, 2), SamplingParams(max_tokens=10)))
    for prompt, params in [
        ((), SamplingParams()),
        ((1,) * 200, SamplingParams()),
        ((9999,), SamplingParams()),
        ((1,), SamplingParams(temperature=-1)),
        ((1,), SamplingParams(top_p=0)),
        ((1,), SamplingParams(max_tokens=0)),
        ((1,), SamplingParams(chain_length=99)),
        ((1,), SamplingParams(drafter="oracle")),
    ]:
        with pytest.raises(RequestError):
            engine.submit(Request("bad", prompt, params))
    assert good.collect()[2].finish_reason in ("stop", "length")


def test_cancel_and_queue_limit(pair: ModelPair) -> None:
    engine = Engine(pair, SETTINGS.model_copy(update={"slots": 1, "queue_limit": 2}))
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    waiting = [engine.submit(Request(str(i), (1, 2), params)) for i in range(2)]
    with pytest.raises(BusyError):
        engine.submit(Request("third", (1, 2), params))
    waiting[1].cancel()
    assert waiting[1].collect()[2].finish_reason == "cancelled"
    engine.start()
    while engine.num_active == 0:
        time.sleep(0.001)
    waiting[0].cancel()
    assert waiting[0].collect()[2].finish_reason == "cancelled"
    engine.stop()


def test_a_long_prompt_does_not_stall_the_others(pair: ModelPair, heard: Heard) -> None:
    """Chunks of 7: a prompt of 120 tokens takes 18 rounds, and the live row makes a step in each."""
    engine = Engine(pair, SETTINGS, heard.listeners)
    short = engine.submit(Request("short", (1, 2), SamplingParams(max_tokens=100, ignore_eos=True, chain_length=0)))
    long = engine.submit(Request("long", (3,) * 120, SamplingParams(max_tokens=5, ignore_eos=True)))
    engine.start()
    assert len(short.collect()[1]) == 100
    assert long.collect()[1] == greedy_of_target(pair, (3,) * 120, 5)
    engine.stop()
    first = next(index for index, step in enumerate(heard.steps) if step.request_id == "long")
    assert [step.request_id for step in heard.steps[:first]].count("short") >= 17


def test_a_prompt_that_cannot_be_prefilled_fails_alone(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(pair, SETTINGS)
    prefill = engine.decoder.target_cache.prefill

    def out_of_memory(row: int, tokens: list[int], *rest: Any, **named: Any) -> Any:
        if 99 in tokens:
            raise RuntimeError("out of memory")
        return prefill(row, tokens, *rest, **named)

    monkeypatch.setattr(engine.decoder.target_cache, "prefill", out_of_memory)
    params = SamplingParams(max_tokens=20)
    texts = [(1, 2, 3), (99, 4, 5), (6, 7, 8)]
    streams = [engine.submit(Request(str(i), prompt, params)) for i, prompt in enumerate(texts)]
    engine.start()
    good, bad, last = (stream.collect() for stream in streams)
    engine.stop()
    assert bad[2].finish_reason == "error" and "out of memory" in str(bad[2].error)
    assert good[1] == greedy_of_target(pair, texts[0], 20) and last[1] == greedy_of_target(pair, texts[2], 20)


def test_rows_that_come_and_go_keep_their_own_text(pair: ModelPair, heard: Heard) -> None:
    """Many prompts of many lengths, some cancelled while they fill or decode, through few rows."""
    engine = Engine(pair, SETTINGS.model_copy(update={"queue_limit": 100}), heard.listeners)
    rng = random.Random(3)
    texts = [tuple(rng.randrange(256) for _ in range(rng.choice([1, 5, 40, 90]))) for _ in range(60)]
    params = [
        SamplingParams(max_tokens=rng.randrange(1, 30), chain_length=rng.choice([0, 2, None]), drafter=drafter)
        for drafter in rng.choices(["model", "ngram", "combined"], k=60)
    ]
    streams = [engine.submit(Request(str(i), t, p)) for i, (t, p) in enumerate(zip(texts, params, strict=True))]
    engine.start()
    cancelled = set(rng.sample(range(60), 15))
    for index in sorted(cancelled):
        while engine.queue_depth > 60 - index:
            time.sleep(0.001)
        streams[index].cancel()
    for index, stream in enumerate(streams):
        _, tokens, last = stream.collect()
        wanted = greedy_of_target(pair, texts[index], params[index].max_tokens)
        if index in cancelled and last.finish_reason == "cancelled":
            assert tokens == wanted[: len(tokens)]
        else:
            assert tokens == wanted
    engine.stop()
    assert engine.num_active == 0


@pytest.mark.parametrize("drafter", ["model", "combined"])
def test_penalised_greedy_output_is_the_targets_own(
    engine: Engine, pair: ModelPair, heard: Heard, drafter: str
) -> None:
    """Against transformers' own repetition penalty; a neighbour without one is left alone."""
    texts = prompts(4, seed=8)
    params = SamplingParams(max_tokens=25, chain_length=4, repetition_penalty=1.3, drafter=drafter)
    plain = engine.submit(Request("plain", texts[0], SamplingParams(max_tokens=25, chain_length=4)))
    streams = [engine.submit(Request(str(i), prompt, params)) for i, prompt in enumerate(texts)]
    for prompt, stream in zip(texts, streams, strict=True):
        output = pair.target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=25,
            do_sample=False,
            repetition_penalty=1.3,
        )
        assert stream.collect()[1] == output[0, len(prompt) :].tolist()
    assert plain.collect()[1] == greedy_of_target(pair, texts[0], 25)
    assert any(step.num_accepted for step in heard.steps if step.request_id != "plain")


def test_penalised_sampling_has_the_penalised_distribution(pair: ModelPair) -> None:
    """Second token after a fixed first one, by chi-square against the penalised target, chains drafted and not."""
    from scipy.stats import chisquare

    from adaptive_spec.verification.distribution import penalised_logits

    runs, prompt = 1500, (10, 20, 30)
    engine = Engine(pair, DecoderSettings(slots=16, max_context_tokens=64, max_chain_length=3, queue_limit=4000))
    engine.start()
    params = [
        SamplingParams(
            max_tokens=2, temperature=0.8, top_k=4, frequency_penalty=2.0, seed=s, ignore_eos=True, chain_length=1
        )
        for s in range(runs)
    ]
    streams = [engine.submit(Request(str(s), prompt, p)) for s, p in enumerate(params)]
    samples = torch.tensor([stream.collect()[1] for stream in streams])
    engine.stop()
    first = int(samples[:, 0].mode().values)
    drawn = samples[samples[:, 0] == first, 1]
    with torch.no_grad():
        logits = pair.target(torch.tensor([[*prompt, first]])).logits[0, -1]
    penalised = penalised_logits(logits, prompt, [first], 1.0, 0.0, 2.0).view(1, 1, -1)
    probs = processed_probs(penalised, Processing.of([SamplingParams(temperature=0.8, top_k=4)]))[0, 0].double()
    probs = probs / probs.sum()
    tokens = probs.nonzero().flatten().tolist()
    assert set(drawn.tolist()) <= set(tokens)
    observed = [int((drawn == token).sum()) for token in tokens]
    assert chisquare(observed, [float(probs[token]) * len(drawn) for token in tokens]).pvalue > 1e-4
