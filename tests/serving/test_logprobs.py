"""What single tokens stand for, in a byte-level vocabulary and in others."""

from typing import Any

import pytest

from adaptive_spec.serving.logprobs import TokenTexts
from tests.conftest import byte_tokenizer


@pytest.mark.parametrize("character", ["a", " ", "\n", "é", "世"])
def test_bytes_of_a_byte_level_vocabulary(character: str) -> None:
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    shown = [texts.text_and_bytes(token) for token in tokenizer(character)["input_ids"]]
    assert bytes(byte for _, stored in shown for byte in stored or []).decode() == character
    if len(shown) == 1:
        assert shown[0][0] == character
    else:
        assert {text for text, _ in shown} == {"\ufffd"}


def test_special_tokens_are_shown_as_they_are_written() -> None:
    assert TokenTexts(byte_tokenizer()).text_and_bytes(257) == ("</s>", list(b"</s>"))


def test_other_vocabularies_are_decoded(tokenizer: Any) -> None:
    assert TokenTexts(tokenizer).text_and_bytes(65) == ("A", [65])
