"""Tiny real models and traces of a rule that a draft can learn."""

from datetime import UTC, datetime

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from adaptive_spec.core import Trace

VOCAB, TOP_K = 128, 8


def tiny_draft(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def toy_traces(count: int, seed: int, step: int = 3, states: int = 16, domain: str = "code") -> list[Trace]:
    """Texts that count upwards by ``step`` modulo ``states``; the target is sure of it, with a little noise."""
    generator = np.random.default_rng(seed)
    return [_trace(generator, index, seed, step, states, domain) for index in range(count)]


def _trace(generator: np.random.Generator, index: int, seed: int, step: int, states: int, domain: str) -> Trace:
    prompt_tokens = int(generator.integers(1, 5))
    completion = int(generator.integers(8, 20))
    start = int(generator.integers(states))
    tokens = tuple(int(start + step * i) % states for i in range(prompt_tokens + completion))
    top_ids = np.zeros((completion, TOP_K), dtype=np.int32)
    log_probs = np.zeros((completion, TOP_K), dtype=np.float32)
    for row in range(completion):
        right = tokens[prompt_tokens + row]
        top_ids[row] = [right, *generator.choice([i for i in range(VOCAB) if i != right], TOP_K - 1, replace=False)]
        log_probs[row] = np.log([0.85, *[0.1 / (TOP_K - 1)] * (TOP_K - 1)])
    return Trace(
        request_id=f"{domain}-{seed}-{index}",
        domain=domain,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        top_ids=top_ids,
        top_log_probs=log_probs,
        tail_mass=np.full(completion, 0.05, dtype=np.float32),
        release=0,
        at=datetime(2026, 1, 1, tzinfo=UTC),
    )
