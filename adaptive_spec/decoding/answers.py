"""Answers to greedy requests, kept for when the same one comes again.

Greedy output depends on the target, the prompt and a few parameters, never on the draft: a swap leaves the cache as it
is.  The least recently used answers make room.  Safe between threads: submitters look up, the engine thread adds.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from adaptive_spec.core import Request
from adaptive_spec.decoding.slot import Delta, TokenLogProb

_WHOLE = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished completion."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    log_probs: tuple[TokenLogProb, ...]


class AnswerCache:
    """Holds at most ``max_tokens`` tokens, prompts and listed log-probs counted; 0 keeps nothing."""

    def __init__(self, max_tokens: int, target_hash: str) -> None:
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._target_hash = target_hash
        self._answers: OrderedDict[Hashable, tuple[int, Answer]] = OrderedDict()  # with their sizes; oldest use first
        self._lock = threading.Lock()

    def find(self, request: Request) -> Answer | None:
        """Return the answer of an earlier request that this one repeats."""
        if not self._concerns(request):
            return None
        with self._lock:
            key = self._key(request)
            if key not in self._answers:
                return None
            self._answers.move_to_end(key)
            return self._answers[key][1]

    def listening(self, request: Request, put: Callable[[Delta], None]) -> Callable[[Delta], None]:
        """Return ``put``, such that the answer is kept when it ends whole.  Not of requests that want no record."""
        if not self._concerns(request) or not request.params.record:
            return put
        heard: list[Delta] = []

        def put_and_hear(delta: Delta) -> None:
            heard.append(delta)
            diverged = (
                delta.usage is not None and delta.usage.num_divergent_tokens > 0
            )  # under a release that came since
            if delta.finish_reason in _WHOLE and not diverged:
                self._add(request, heard)
            put(delta)

        return put_and_hear

    def _concerns(self, request: Request) -> bool:
        return self._max_tokens > 0 and request.params.greedy

    def _add(self, request: Request, deltas: list[Delta]) -> None:
        answer = Answer(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            finish_reason=deltas[-1].finish_reason or "",
            log_probs=tuple(entry for delta in deltas for entry in delta.log_probs),
        )
        listed = sum(1 + len(entry.top) for entry in answer.log_probs)
        size = len(request.prompt_ids) + len(answer.token_ids) + listed
        if size > self._max_tokens:
            return
        with self._lock:
            key = self._key(request)
            self.num_tokens += size - self._answers.pop(key, (0, answer))[0]
            self._answers[key] = (size, answer)
            while self.num_tokens > self._max_tokens:
                self.num_tokens -= self._answers.popitem(last=False)[1][0]

    def _key(self, request: Request) -> Hashable:
        """Everything that greedy output depends on; seed, top-k, top-p and min-p are not among it."""
        params = request.params
        return (
            self._target_hash,
            request.prompt_ids,
            params.max_tokens,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            params.stop,
            params.ignore_eos,
            params.logprobs,
        )
