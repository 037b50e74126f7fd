"""Log-probs as OpenAI's two routes write them.  Tokens are shown as text, and where known as bytes."""

from collections.abc import Sequence
from typing import Any

from adaptive_spec.serving.ports import TokenLogProb

_PRINTABLE = (
    *range(33, 127),
    *range(161, 173),
    *range(174, 256),
)  # bytes that byte-level vocabularies write as they are
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}


class TokenTexts:
    """What single tokens of a vocabulary stand for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_level = "ByteLevel" in str(tokenizer.backend_tokenizer.decoder)

    def text_and_bytes(self, token_id: int) -> tuple[str, list[int] | None]:
        """Return a token's text, and its bytes; None where the vocabulary does not tell."""
        symbols = self._tokenizer.convert_ids_to_tokens(token_id) if self._byte_level else None
        if symbols and all(symbol in _BYTE_OF for symbol in symbols):
            stored = bytes(_BYTE_OF[symbol] for symbol in symbols)
            return stored.decode(errors="replace"), list(stored)
        text = str(self._tokenizer.decode([token_id]))
        return text, None if "\ufffd" in text else list(text.encode())


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogProb]) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice."""

    def shown(token_id: int, log_prob: float) -> dict[str, Any]:
        text, stored = texts.text_and_bytes(token_id)
        return {"token": text, "logprob": log_prob, "bytes": stored}

    content = [
        shown(entry.token_id, entry.log_prob) | {"top_logprobs": [shown(*alternative) for alternative in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(texts: TokenTexts, entries: Sequence[TokenLogProb], offset: int) -> dict[str, Any]:
    """The ``logprobs`` of a completion choice; ``offset``: characters of the tokens before these."""
    tokens = [texts.text_and_bytes(entry.token_id)[0] for entry in entries]
    offsets = [offset + sum(map(len, tokens[:place])) for place in range(len(tokens))]
    # The chosen token is always listed, also when it is not among the most probable.
    tops = [
        {texts.text_and_bytes(token_id)[0]: log_prob for token_id, log_prob in entry.top} | {token: entry.log_prob}
        for token, entry in zip(tokens, entries, strict=True)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [entry.log_prob for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
