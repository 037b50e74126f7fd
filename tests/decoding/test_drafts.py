"""Several drafts in one batch, trimmed heads, static shapes: nothing of it may change what the target says."""

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from adaptive_spec.core import Release, Request, SamplingParams, Thresholds
from adaptive_spec.decoding import verdict as verdict_module
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.errors import ModelError, ReleaseError
from adaptive_spec.models.loading import ModelPair, pair_of
from adaptive_spec.models.weights import Draft, DraftWeights, LoadedRelease
from adaptive_spec.settings import DecoderSettings
from tests.conftest import byte_tokenizer
from tests.decoding.heard import Heard
from tests.decoding.test_decoder import SETTINGS, _chi_square_p, greedy_of_target, prompts


@pytest.fixture
def engine(pair: ModelPair, heard: Heard) -> Iterator[Engine]:
    engine = Engine(pair, SETTINGS.model_copy(update={"explore_share": 0.0, "queue_limit": 4000}), heard.listeners)
    engine.start()
    yield engine
    engine.swap(LoadedRelease()).result()
    engine.stop()


def to_target(pair: ModelPair) -> dict[str, Tensor]:
    """The update that makes the draft the target."""
    target = dict(pair.target.named_parameters())
    return {
        name: (target[name] - parameter).detach().clone()
        for name, parameter in pair.draft.named_parameters()
        if name.startswith("model.layers") and parameter.dim() == 2
    }


def noise(pair: ModelPair) -> dict[str, Tensor]:
    """An update that spoils the draft."""
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(delta.shape, generator=generator) * 0.5 for name, delta in to_target(pair).items()}


def test_adapters_of_several_domains_share_a_batch(engine: Engine, heard: Heard, pair: ModelPair) -> None:
    """Four domains, two with adapters of their own, one request that asks for another domain's: all in one batch."""
    engine.swap(LoadedRelease(Release(1), own={"good": to_target(pair), "bad": noise(pair)})).result()
    texts = prompts(12, seed=3)
    wanted = [("good", None), ("bad", None), ("other", None), ("bad", "good"), ("good", "shared"), ("other", "bad")]
    streams = [
        engine.submit(Request(f"{i}", text, SamplingParams(max_tokens=24, chain_length=3, adapter=adapter), domain))
        for i, (text, (domain, adapter)) in enumerate(zip(texts, wanted * 2, strict=True))
    ]
    for text, stream in zip(texts, streams, strict=True):
        assert stream.collect()[1] == greedy_of_target(pair, text, 24)

    def acceptance(kind: tuple[str, str | None]) -> float:
        steps = [step for step in heard.steps if (wanted * 2)[int(step.request_id)] == kind]
        return sum(step.num_accepted for step in steps) / sum(step.chain_length for step in steps)

    rates = {kind: acceptance(kind) for kind in wanted}
    assert min(rates["good", None], rates["bad", "good"]) > rates["other", None] > rates["bad", None]
    assert rates["good", "shared"] > rates["other", "bad"]


def test_a_copy_of_the_draft_shares_what_no_adapter_changes(pair: ModelPair) -> None:
    weights = DraftWeights(pair.draft)
    before = {name: parameter.clone() for name, parameter in pair.draft.named_parameters()}
    deltas = to_target(pair)
    name = next(iter(deltas))
    first = weights.prepare(LoadedRelease(own={"own": {name: deltas[name]}}))
    base, own = dict(pair.draft.named_parameters()), dict(first.of("own").model.named_parameters())
    assert first.shared.model is pair.draft
    assert {n for n in base if own[n] is not base[n]} == {name}
    assert torch.equal(own[name], before[name] + deltas[name])
    second = weights.prepare(LoadedRelease(deltas=deltas, own={"own": {name: deltas[name]}, "second": {}}))
    assert second.of("own") is first.of("own") and second.of("second") is first.shared
    assert all(torch.equal(p, before[n] + deltas[n]) for n, p in _parameters(second.shared).items() if n in deltas)
    with pytest.raises(ReleaseError, match="not finite"):
        weights.prepare(LoadedRelease(own={"own": {name: deltas[name] * float("nan")}}))
    assert torch.equal(own[name], before[name] + deltas[name])
    assert all(torch.equal(p, before[n]) for n, p in pair.draft.named_parameters())


def test_a_copy_that_nobody_drafts_with_is_written_again(pair: ModelPair) -> None:
    weights = DraftWeights(pair.draft)
    deltas = to_target(pair)
    first, *others = deltas
    held = weights.prepare(LoadedRelease(deltas=deltas))
    beside = weights.prepare(LoadedRelease(deltas={first: -deltas[first]}))
    assert beside.shared.model is not held.shared.model
    model, place = beside.shared.model, _parameters(beside.shared)[first].data_ptr()
    del beside
    again = weights.prepare(LoadedRelease(deltas={others[0]: deltas[others[0]]}))
    assert again.shared.model is model and _parameters(again.shared)[first].data_ptr() == place
    base = dict(pair.draft.named_parameters())
    changed = {n for n, p in _parameters(again.shared).items() if not torch.equal(p, base[n])}
    assert changed == {others[0]}
    assert torch.equal(_parameters(held.shared)[first], base[first] + deltas[first])


def _parameters(draft: Draft) -> dict[str, Tensor]:
    return dict(draft.model.named_parameters())


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_trimmed_vocabulary_changes_no_token(engine: Engine, heard: Heard, pair: ModelPair, penalty: float) -> None:
    engine.swap(LoadedRelease(Release(1, vocabulary=tuple(range(100))))).result()
    plain = SamplingParams(max_tokens=24, chain_length=0, repetition_penalty=penalty)
    params = SamplingParams(max_tokens=24, chain_length=3, repetition_penalty=penalty)
    for i, text in enumerate(prompts(6, seed=4)):
        alone = engine.submit(Request(f"p{i}", text, plain)).collect()[1]
        assert engine.submit(Request(f"s{i}", text, params)).collect()[1] == alone
    assert sum(step.num_accepted for step in heard.steps) > 0
    with pytest.raises(ReleaseError, match="vocabulary"):
        engine.swap(LoadedRelease(Release(2, vocabulary=(258,)))).result()


@pytest.mark.parametrize("static", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_sampling_with_trimmed_vocabulary_and_optimal_stopping_has_the_targets_distribution(
    pair: ModelPair, static: bool
) -> None:
    """Half of the tokens the target likes cannot be drafted, floors bite, and the draft is sharper than trained."""
    from adaptive_spec.calibration.cost import CostModel
    from adaptive_spec.core import StepCost

    heard = Heard()
    settings = DecoderSettings(
        slots=16, max_context_tokens=64, max_chain_length=3, queue_limit=4000, static_shapes="on" if static else "off"
    )
    engine = Engine(pair, settings, heard.listeners)
    engine.start()
    thresholds = Thresholds(survival=(0.7, 0.6, 0.5), temperature=1.2, offset=-0.1, sampling_temperature=0.6)
    release = Release(1, {"*": thresholds}, vocabulary=tuple(range(0, 258, 2)))
    engine.swap(LoadedRelease(release)).result()
    engine.decoder.price(CostModel({1: StepCost(0.12, (1.0, 1.0, 1.0, 1.0), "cheap")}))
    prompt, runs = (10, 20, 30), 1500
    params = [SamplingParams(max_tokens=5, temperature=0.8, top_k=5, seed=s, ignore_eos=True) for s in range(runs)]
    streams = [engine.submit(Request(str(s), prompt, p)) for s, p in enumerate(params)]
    samples = torch.tensor([stream.collect()[1] for stream in streams])
    engine.stop()
    assert len({step.chain_length for step in heard.steps}) > 2  # the policy went on here and stopped there
    for position in (1, 2):
        assert _chi_square_p(pair, prompt, samples, position) > 1e-4


@pytest.mark.parametrize("chain_length", [0, 2, 4, None])
def test_static_shapes_change_no_token_and_are_few(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch, chain_length: int | None
) -> None:
    """On a device a step is a handful of shapes, and one read brings its outcome to the host."""
    engine = Engine(pair, SETTINGS.model_copy(update={"static_shapes": "on", "max_context_tokens": 300}))
    shapes: set[tuple[str, tuple[int, ...], int]] = set()
    for name in ("target_cache", "draft_cache"):
        cache = getattr(engine.decoder, name)

        def run(body: object, ids: Tensor, *rest: Tensor, cache: object = cache, name: str = name) -> Tensor:
            shapes.add((name, tuple(ids.shape), cache.longest))  # type: ignore[attr-defined]
            return cache._run(body, ids, *rest)  # type: ignore[attr-defined, no-any-return]

        monkeypatch.setattr(cache, "_hidden", run)
    reads: list[int] = []
    steps: list[int] = []
    step, read = engine.decoder.step, verdict_module.read

    def counted(*tensors: Tensor) -> object:
        reads.append(len(tensors))
        return read(*tensors)

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("the host waits for the device in the middle of a step")

    def watched() -> None:
        steps.append(1)
        with monkeypatch.context() as patch:
            for method in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu"):
                patch.setattr(Tensor, method, forbidden)
            step()

    monkeypatch.setattr(verdict_module, "read", counted)
    monkeypatch.setattr(engine.decoder, "step", watched)
    engine.start()
    params = SamplingParams(max_tokens=40, chain_length=chain_length)
    streams = [engine.submit(Request(str(i), text, params)) for i, text in enumerate(prompts(8))]
    outputs = [stream.collect() for stream in streams]
    engine.stop()
    for text, (_, tokens, last) in zip(prompts(8), outputs, strict=True):
        assert last.error is None
        assert tokens == greedy_of_target(pair, text, 40)
    assert len(reads) == len(steps) + 8  # a prompt's first token is read too
    # Per model: a prefill chunk, what the draft has not seen, one drafted token, a verification with chain and without.
    assert {shape for _, shape, _ in shapes} <= {(1, 7), (3, 5), (3, 1)}
    assert {window for _, _, window in shapes} <= {128, 305 + 7 - 7 + 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch uses its own deprecated parts when it compiles
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_forwards_change_no_token(pair: ModelPair, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """``aot_eager`` captures the same graphs and runs them as they are; what takes long is the compiler of C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    engine = Engine(pair, SETTINGS.model_copy(update={"static_shapes": "on", "compile": "default"}))
    engine.start()
    engine.swap(LoadedRelease(Release(1), to_target(pair))).result()
    params = SamplingParams(max_tokens=12, chain_length=4)
    for i, text in enumerate(prompts(2, seed=9)):
        assert engine.submit(Request(str(i), text, params)).collect()[1] == greedy_of_target(pair, text, 12)
    engine.swap(LoadedRelease()).result()
    engine.stop()


SMALL = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}


@pytest.mark.parametrize("kind", [MistralConfig, Qwen2Config, Qwen3Config, GemmaConfig])
def test_other_families_decode_as_they_do_alone(kind: type[PreTrainedConfig]) -> None:
    torch.manual_seed(0)
    config = kind(**SMALL)
    config.initializer_range = 0.2
    target = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    pair = pair_of(target, target, byte_tokenizer(), "tiny")
    engine = Engine(pair, SETTINGS)
    engine.start()
    params = SamplingParams(max_tokens=20, chain_length=3)
    streams = [engine.submit(Request(str(i), text, params)) for i, text in enumerate(prompts(4))]
    found = [stream.collect()[1] for stream in streams]
    engine.stop()
    assert found == [greedy_of_target(pair, text, 20) for text in prompts(4)]


def test_models_that_cannot_be_decoded_are_refused_at_load() -> None:
    small = AutoModelForCausalLM.from_config(MistralConfig(**SMALL, sliding_window=64))
    with pytest.raises(ModelError, match=r"last 64 tokens.*Lower decoder.max_context_tokens"):
        Engine(pair_of(small, small, byte_tokenizer(), "tiny"), SETTINGS)
    recurrent = AutoModelForCausalLM.from_config(
        Qwen3NextConfig(
            **SMALL, num_experts=2, num_experts_per_tok=1, layer_types=["linear_attention", "full_attention"]
        )
    )
    with pytest.raises(ModelError, match="linear_attention"):
        Engine(pair_of(recurrent, recurrent, byte_tokenizer(), "tiny"), SETTINGS)
    scaled = AutoModelForCausalLM.from_config(GraniteConfig(**SMALL, logits_scaling=3.0))
    with pytest.raises(ModelError, match="other logits here"):
        Engine(pair_of(scaled, scaled, byte_tokenizer(), "tiny"), SETTINGS)
    foreign = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=258, n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(ModelError, match="does not decode here"):
        Engine(pair_of(foreign, foreign, byte_tokenizer(), "tiny"), SETTINGS)


def test_an_update_of_what_draft_and_target_share_is_refused() -> None:
    """A cut draft's head is its target's own: changing it would change what the target says."""
    from adaptive_spec.models.draft import cut_draft
    from tests.conftest import tiny_model

    target = tiny_model(0)
    weights = DraftWeights(cut_draft(target, [0]))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        with pytest.raises(ReleaseError, match="share with its target"):
            weights.prepare(LoadedRelease(deltas={name: torch.zeros(258, 32)}))


@pytest.mark.parametrize("static", [False, True])
def test_costs_of_many_slots_are_measured(pair: ModelPair, static: bool) -> None:
    engine = Engine(pair, DecoderSettings(slots=96, max_context_tokens=32, static_shapes="on" if static else "off"))
    assert engine.decoder.time_verify(96, 6) > 0 and engine.decoder.time_draft(96) > 0


def test_a_seed_does_not_depend_on_the_neighbours_chains(pair: ModelPair) -> None:
    def said(neighbour: int | None) -> list[int]:
        engine = Engine(pair, SETTINGS)
        seeded = SamplingParams(max_tokens=12, temperature=1.0, seed=7, chain_length=0, ignore_eos=True)
        stream = engine.submit(Request("a", (1, 2, 3), seeded))
        if neighbour is not None:
            other = SamplingParams(max_tokens=12, temperature=1.0, seed=1, chain_length=neighbour, ignore_eos=True)
            engine.submit(Request("b", (4, 5), other))
        engine.start()
        tokens = stream.collect()[1]
        engine.stop()
        return tokens

    assert said(None) == said(0) == said(2) == said(4)


def test_domains_of_which_nothing_is_known_learn_beside_the_others(pair: ModelPair) -> None:
    from adaptive_spec.calibration.cost import CostModel
    from adaptive_spec.core import StepCost

    heard = Heard()
    engine = Engine(pair, SETTINGS.model_copy(update={"explore_share": 0.01}), heard.listeners)
    engine.decoder.price(CostModel({1: StepCost(5.0, (1.0, 2.0, 3.0, 4.0, 5.0), "drafting never pays")}))
    engine.start()

    def serve(name: str, domain: str, tokens: int) -> list[int]:
        heard.steps.clear()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.submit(Request(name, (1, 2, 3), params, domain)).collect()
        engine.call(lambda: None).result()
        return [step.chain_length for step in heard.steps if step.explored]

    for index in range(5):
        assert not serve(f"short {index}", "short", 2)  # no room for a chain: nothing to learn
    assert len(serve("first", "first", 80)) >= 16  # nothing is known at all
    assert sum(len(serve(f"new {index}", f"new {index}", 40)) for index in range(4)) < 60  # others are
    engine.stop()
