"""Tiny real models that every room's tests share."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from adaptive_spec.models.loading import ModelPair, pair_of
from tests.postgresql import PostgreSQL

torch.set_num_threads(1)


def tiny_model(seed: int, layers: int = 2, vocab: int = 258, scale: float = 1.0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
    )
    config.initializer_range = 0.2 * scale
    return LlamaForCausalLM(config).eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    wrapped.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    return wrapped


def noisy(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Add noise to a model, in place: a draft that agrees with what it was often, not always."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.1)
    return model


@pytest.fixture(scope="session")
def pair() -> ModelPair:
    """A target and a draft that agrees with it often, not always."""
    return pair_of(tiny_model(0), noisy(tiny_model(0)), byte_tokenizer(), "tiny")


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQL]:
    server = PostgreSQL()
    yield server
    server.close()
