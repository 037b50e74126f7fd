"""Pairs: loaded from folders, refused when they do not belong together."""

from pathlib import Path

import pytest

from adaptive_spec.errors import ModelError
from adaptive_spec.models.gguf import convert_gguf
from adaptive_spec.models.loading import load_pair, weights_hash
from adaptive_spec.settings import ModelSettings
from tests.conftest import byte_tokenizer, tiny_model


def save(folder: Path, seed: int, vocab: int = 258) -> str:
    tiny_model(seed, vocab=vocab).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def test_a_pair_of_folders(tmp_path: Path) -> None:
    target, draft = save(tmp_path / "t", 0), save(tmp_path / "d", 1)
    pair = load_pair(ModelSettings(target=target, draft=draft))
    again = load_pair(ModelSettings(target=target, draft=draft))
    assert pair.hashes == again.hashes
    assert pair.hashes["target"] != pair.hashes["draft"] == weights_hash(tiny_model(1))
    assert pair.eos_token_ids == (257,)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="vocabulary"):
        load_pair(ModelSettings(target=save(tmp_path / "t", 0), draft=save(tmp_path / "d", 1, vocab=300)))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, draft = save(tmp_path / "t", 0), save(tmp_path / "d", 1)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["foreign"])
    tokenizer.save_pretrained(draft)
    with pytest.raises(ModelError, match="tokenizers"):
        load_pair(ModelSettings(target=target, draft=draft))


def test_what_is_not_a_model_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="hub id, a folder or a GGUF"):
        load_pair(ModelSettings(target=str(tmp_path)))
    with pytest.raises(ModelError, match="does not exist"):
        load_pair(ModelSettings(target=str(tmp_path / "nowhere.gguf")))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUX" + bytes(100))
    with pytest.raises(ModelError, match="not a readable GGUF"):
        convert_gguf(broken, tmp_path / "out")


def test_no_bundled_draft_for_a_foreign_target(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cut-draft"):
        load_pair(ModelSettings(target=save(tmp_path / "t", 0)))
