"""What only a device can show, in under five minutes: `make test-gpu`.  Skipped where there is none.

Greedy output in float32 is the target's own, eager, compiled and captured; a step makes the host wait once; memory does
not grow; a swap leaves captured graphs valid.
"""

import random
import statistics
import time
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive_spec.core import Release, Request, SamplingParams
from adaptive_spec.decoding import verdict
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.models.loading import ModelPair, pair_of
from adaptive_spec.models.weights import LoadedRelease
from adaptive_spec.settings import DecoderSettings
from tests.conftest import byte_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """Big enough to take time, with a draft that agrees often: the target with noise."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=257,
        pad_token_id=257,
    )
    config.initializer_range = 0.06
    target = LlamaForCausalLM(config).cuda().eval()
    draft = LlamaForCausalLM(config).cuda().eval()
    with torch.no_grad():
        for mine, its in zip(draft.parameters(), target.parameters(), strict=True):
            mine.copy_(its + torch.randn_like(its) * its.std() * 0.02)
    return pair_of(target, draft, byte_tokenizer(), "device")


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(256) for _ in range(rng.randrange(5, 200))) for _ in range(count)]


def alone(pair: ModelPair, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device="cuda")
    output = pair.target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


def engine_of(pair: ModelPair, mode: str) -> Engine:
    settings = DecoderSettings(slots=8, max_context_tokens=320, max_chain_length=4, compile=mode)  # type: ignore[arg-type]
    engine = Engine(pair, settings)
    assert engine.decoder.target_cache.static
    engine.start()
    return engine


@pytest.mark.parametrize("mode", ["off", "default", "reduce-overhead"])
def test_greedy_is_the_targets_own_across_a_swap(pair: ModelPair, mode: str) -> None:
    engine = engine_of(pair, mode)
    params = SamplingParams(max_tokens=48, chain_length=4)
    for turn in range(2):
        streams = [engine.submit(Request(f"{turn}-{i}", text, params)) for i, text in enumerate(prompts(12))]
        for text, stream in zip(prompts(12), streams, strict=True):
            assert stream.collect()[1] == alone(pair, text, 48)
        target = dict(pair.target.named_parameters())
        deltas = {
            name: (target[name] - parameter).detach().clone()
            for name, parameter in pair.draft.named_parameters()
            if "layers" in name and parameter.dim() == 2
        }
        engine.swap(LoadedRelease(Release(turn + 1), deltas if turn == 0 else {})).result()
    engine.stop()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_makes_the_host_wait_once(pair: ModelPair, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(pair, "off")
    step, read, waits = engine.decoder.step, verdict.read, [0]

    def counted(*tensors: torch.Tensor) -> Any:
        waits[0] += 1
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(*tensors)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    def strict() -> None:
        torch.cuda.set_sync_debug_mode("error")
        before = waits[0]
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert waits[0] == before + 1

    with monkeypatch.context() as patch:
        patch.setattr(verdict, "read", lambda *tensors: counted(*tensors) if armed else read(*tensors))
        patch.setattr(engine.decoder, "step", lambda: (armed.append(1), strict(), armed.clear()))
        armed: list[int] = []
        params = SamplingParams(max_tokens=32, chain_length=4, temperature=temperature, top_k=20, seed=0)
        outcomes = [
            stream.collect()[2]
            for stream in [engine.submit(Request(str(i), text, params)) for i, text in enumerate(prompts(8))]
        ]
    assert [outcome.error for outcome in outcomes] == [None] * 8
    engine.stop()


def test_memory_does_not_grow_and_a_step_is_timed(pair: ModelPair) -> None:
    engine = engine_of(pair, "off")
    params = SamplingParams(max_tokens=64, chain_length=4, ignore_eos=True)

    def serve(turn: int) -> float:
        began = time.perf_counter()
        streams = [engine.submit(Request(f"{turn}-{i}", text, params)) for i, text in enumerate(prompts(8))]
        tokens = sum(len(stream.collect()[1]) for stream in streams)
        return tokens / (time.perf_counter() - began)

    serve(0)
    peak = torch.cuda.max_memory_allocated()
    rates = [serve(turn) for turn in range(1, 6)]
    assert torch.cuda.max_memory_allocated() <= peak
    print(f"\n{torch.cuda.get_device_name()}: {statistics.median(rates):.0f} tokens/s at batch 8, chains of 4")
    engine.stop()
