"""Healing: the target writes, the draft learns, excluded text never enters."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adaptive_spec.errors import ModelError
from adaptive_spec.healing.corpus import load_corpus, save_corpus, write_corpus
from adaptive_spec.healing.heal import cut, cut_and_heal, heal, train
from adaptive_spec.healing.recipe import Recipe
from adaptive_spec.models.draft import cut_draft, load_cut_draft
from adaptive_spec.models.loading import ModelPair, load_target, pair_of
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


SHORT = replace(RECIPE, num_tokens=300, steps=3, rows=8)


def saved_target(folder: Path) -> str:
    tiny_model(0, layers=3).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def layers_of(folder: Path) -> bytes:
    return (folder / "layers.safetensors").read_bytes()


def test_cutting_and_healing_apart_come_to_the_same_as_both_together(tmp_path: Path) -> None:
    target = saved_target(tmp_path / "target")
    cut(target, [0, 2], tmp_path / "apart")
    description = json.loads((tmp_path / "apart" / "draft.json").read_text())
    assert (description["layers"], description["recipe"]) == ([0, 2], {})
    bare = layers_of(tmp_path / "apart")
    heal(tmp_path / "apart", SHORT, quiet)
    (tmp_path / "together").mkdir()
    shutil.copy(tmp_path / "apart" / "corpus.safetensors", tmp_path / "together")  # writing hangs on timing
    cut_and_heal(target, [0, 2], tmp_path / "together", SHORT, quiet)
    apart, together = (
        json.loads((tmp_path / name / "draft.json").read_text())["recipe"] for name in ("apart", "together")
    )
    assert apart["num_tokens_written"] == together["num_tokens_written"] >= 300
    assert apart["history"][-1]["overlap"] == pytest.approx(together["history"][-1]["overlap"], abs=1e-3)
    assert layers_of(tmp_path / "apart") != bare
    load_cut_draft(tmp_path / "apart", load_target(target)[0])


def test_a_healed_draft_is_healed_further_from_where_it_is(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    draft = tmp_path / "draft"
    cut_and_heal(saved_target(tmp_path / "target"), [0], draft, SHORT, quiet)
    first = json.loads((draft / "draft.json").read_text())["recipe"]
    (tmp_path / "target").rename(tmp_path / "moved")
    with pytest.raises(ModelError):
        heal(draft, SHORT, quiet)
    heal(draft, replace(SHORT, steps=2), heard.append, str(tmp_path / "moved"))
    second = json.loads((draft / "draft.json").read_text())
    assert second["recipe"]["continues"] == first and second["target"] == str(tmp_path / "moved")
    assert second["recipe"]["history"][0]["overlap"] == pytest.approx(first["history"][-1]["overlap"], abs=1e-2)
    assert {part["phase"] for part in heard} == {"train"}, "the corpus is there already"


def test_healing_what_is_no_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a readable draft"):
        heal(tmp_path, SHORT, quiet)
