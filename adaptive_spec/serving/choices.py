"""How the two OpenAI routes write choices, usage and what speculation did."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from adaptive_spec.core import Request
from adaptive_spec.serving.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from adaptive_spec.serving.ports import TokenLogProb, Usage

LogProbs = Sequence[TokenLogProb] | None  # None: not asked for


class CompletionChoices:
    """Choices of /v1/completions, of one response."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, tokenizer: Any) -> None:
        self._texts = TokenTexts(tokenizer)
        self._offsets: Counter[int] = Counter()  # characters of the tokens that each choice has shown

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream sends before the first token."""
        return None

    def piece(self, index: int, text: str, reason: str | None, entries: LogProbs) -> dict[str, Any]:
        """A part of a choice."""
        logprobs = None
        if entries is not None:
            logprobs = completion_logprobs(self._texts, entries, self._offsets[index])
            self._offsets[index] += sum(map(len, logprobs["tokens"]))
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    whole = piece


class ChatChoices:
    """Choices of /v1/chat/completions."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, tokenizer: Any) -> None:
        self._texts = TokenTexts(tokenizer)

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream sends before the first token."""
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def piece(self, index: int, text: str, reason: str | None, entries: LogProbs) -> dict[str, Any]:
        """A part of a choice."""
        return self._choice(index, {"delta": {"content": text} if text else {}}, reason, entries)

    def whole(self, index: int, text: str, reason: str | None, entries: LogProbs) -> dict[str, Any]:
        """A whole choice."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._choice(index, {"message": message}, reason, entries)

    def _choice(self, index: int, said: dict[str, Any], reason: str | None, entries: LogProbs) -> dict[str, Any]:
        logprobs = None if entries is None else chat_logprobs(self._texts, entries)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


def summary(request: Request, spent: Sequence[Usage]) -> dict[str, Any]:
    """``usage`` and ``speculation`` of a response: sums over its choices, the prompt counted once."""
    completion = sum(each.completion_tokens for each in spent)
    proposed = sum(each.num_draft_tokens for each in spent)
    accepted = sum(each.num_accepted_draft_tokens for each in spent)
    return {
        "usage": {
            "prompt_tokens": spent[0].prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": spent[0].prompt_tokens + completion,
            # Proposed tokens are reported as OpenAI reports predicted ones.
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": proposed - accepted,
            },
        },
        "speculation": {
            "domain": request.domain,
            "releases": sorted({release for each in spent for release in each.releases}),
            "num_spec_steps": sum(each.num_steps for each in spent),
            "num_divergent_tokens": sum(each.num_divergent_tokens for each in spent),
            "cached": all(each.cached for each in spent),
        },
    }
