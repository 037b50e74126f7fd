"""Healing: the target writes, the draft learns, excluded text never enters."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptive_spec.errors import ModelError
from adaptive_spec.healing.corpus import load_corpus, save_corpus, write_corpus
from adaptive_spec.healing.heal import train
from adaptive_spec.healing.recipe import Recipe
from adaptive_spec.models.draft import cut_draft
from adaptive_spec.models.loading import ModelPair, pair_of
from tests.conftest import byte_tokenizer, tiny_model

RECIPE = Recipe(
    num_tokens=1500, steps=60, rows=24, user_tokens=60, answer_tokens=24, batch_tokens=256, top_k=32, learning_rate=3e-3
)


def quiet(_: dict[str, Any]) -> None:
    return None


def writing_pair(layers: int = 2) -> ModelPair:
    target = tiny_model(0, layers=layers)
    return pair_of(target, cut_draft(target, [0]), byte_tokenizer(), "tiny")


def test_a_healed_draft_agrees_more(tmp_path: Path) -> None:
    pair = writing_pair(layers=3)
    corpus = write_corpus(pair, RECIPE, quiet)
    save_corpus(corpus, tmp_path / "corpus.safetensors")
    again = load_corpus(tmp_path / "corpus.safetensors")
    assert [trace.tokens for trace in again] == [trace.tokens for trace in corpus]
    assert sum(len(trace.top_ids) for trace in again) >= 1500
    draft = pair.draft
    embeddings = draft.get_input_embeddings().weight.clone()
    history = train(draft, again, RECIPE, quiet, lambda: None)
    assert history[-1]["overlap"] > history[0]["overlap"]
    assert history[-1]["agreement"] > history[0]["agreement"]
    assert (draft.get_input_embeddings().weight == embeddings).all()


def test_excluded_text_is_dropped() -> None:
    heard: list[dict[str, Any]] = []
    recipe = replace(RECIPE, num_tokens=400, rows=64, exclude=(r"[0-9]",))
    corpus = write_corpus(writing_pair(), recipe, heard.append)
    assert heard[-1]["dropped"] > 0
    assert not any(re.search("[0-9]", byte_tokenizer().decode(trace.tokens)) for trace in corpus)


def test_a_target_that_writes_nothing_usable_is_told_apart_from_a_slow_one() -> None:
    recipe = replace(RECIPE, rows=4, user_tokens=4, exclude=(".",))
    with pytest.raises(ModelError, match="exclude"):
        write_corpus(writing_pair(), recipe, quiet)
