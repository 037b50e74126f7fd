"""Healing: the target writes, the draft learns, excluded text never enters."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptive_spec.errors import ModelError
from adaptive_spec.learning.heal import HealSettings, load_corpus, save_corpus, train, write_corpus
from adaptive_spec.models.draft import cut_draft
from tests.conftest import byte_tokenizer, tiny_model

SETTINGS = HealSettings(
    num_tokens=1500, steps=60, rows=24, user_tokens=60, answer_tokens=24, batch_tokens=256, top_k=32, learning_rate=3e-3
)


def quiet(_: dict[str, Any]) -> None:
    return None


def test_a_healed_draft_agrees_more(tmp_path: Path) -> None:
    target = tiny_model(0, layers=3)
    corpus = write_corpus(copy.deepcopy(target), byte_tokenizer(), SETTINGS, quiet)
    save_corpus(corpus, tmp_path / "corpus.safetensors")
    again = load_corpus(tmp_path / "corpus.safetensors")
    assert again.num_tokens == corpus.num_tokens >= 1500
    draft = cut_draft(target, [0])
    embeddings = draft.get_input_embeddings().weight.clone()
    history = train(draft, again, SETTINGS, quiet, lambda: None)
    assert history[-1]["kl_nats"] < history[0]["kl_nats"]
    assert (draft.get_input_embeddings().weight == embeddings).all()


def test_excluded_text_is_dropped() -> None:
    heard: list[dict[str, Any]] = []
    settings = replace(SETTINGS, num_tokens=400, rows=64, exclude=(r"[0-9]",))
    corpus = write_corpus(tiny_model(0), byte_tokenizer(), settings, heard.append)
    assert heard[-1]["dropped"] > 0
    assert not any(re.search("[0-9]", byte_tokenizer().decode(row)) for row in corpus.tokens)


def test_a_target_that_writes_nothing_usable_is_told_apart_from_a_slow_one() -> None:
    settings = replace(SETTINGS, rows=4, user_tokens=4, exclude=(".",))
    with pytest.raises(ModelError, match="exclude"):
        write_corpus(tiny_model(0), byte_tokenizer(), settings, quiet)
