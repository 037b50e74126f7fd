"""Text that the target writes by itself, as traces.

An instruct model that sees only the opening of a user turn writes a plausible user turn, then answers it (Magpie,
arXiv 2406.08464): no prompts are needed, and the text is what serving will ask of the draft.  The live decoder does
the writing, so every trace comes with the target's distributions.  Conversations that match ``exclude`` are dropped,
so that a domain can be kept unseen.
"""

import queue
import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adaptive_spec.core import Request, SamplingParams, Trace
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.errors import ModelError
from adaptive_spec.healing.recipe import Recipe
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.records.screening import is_degenerate
from adaptive_spec.settings import DecoderSettings

Progress = Callable[[dict[str, Any]], None]
_MOST_FRUITLESS = 1000  # turns in a row that cannot be used before giving up
_PATIENCE_SECONDS = 600.0  # for one more trace


class _Writer:
    """Keeps ``rows`` conversations going: a user turn first, then the answer to it."""

    def __init__(self, pair: ModelPair, recipe: Recipe) -> None:
        self._recipe = recipe
        self._tokenizer = pair.tokenizer
        self._excluded = [re.compile(pattern, re.IGNORECASE) for pattern in recipe.exclude]
        self._opening, self._answer = _template_parts(pair.tokenizer)
        self._eos = frozenset(pair.eos_token_ids)
        self._finished: queue.SimpleQueue[Trace] = queue.SimpleQueue()
        self._turns: dict[str, Trace] = {}
        self._asked = 0
        longest = len(self._opening) + len(self._answer) + recipe.user_tokens + recipe.answer_tokens
        settings = DecoderSettings(
            slots=recipe.rows, max_context_tokens=max(longest, 16), max_chain_length=0, queue_limit=2 * recipe.rows
        )
        self._engine = Engine(pair, settings, Listeners(on_trace=self._finished.put, trace_top_k=recipe.top_k))

    def __enter__(self) -> "_Writer":
        self._engine.start()
        for _ in range(self._recipe.rows):
            self._ask()
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.call(lambda: self._engine.decoder.end_all("cancelled")).result()
        self._engine.stop()

    def next(self) -> list[Trace] | None:
        """Wait for a turn to end.  Returns the turns of a conversation that may be kept, [] if it may not be.

        None: the conversation goes on.
        """
        try:
            trace = self._finished.get(timeout=_PATIENCE_SECONDS)
        except queue.Empty:
            raise ModelError("The target stopped writing; the log tells why.") from None
        turn = self._turns.pop(trace.request_id, None)
        if turn is None and (question := self._question(trace)):
            self._turns[trace.request_id] = trace
            self._submit(trace.request_id, question, self._temperature(trace.request_id), self._recipe.answer_tokens)
            return None
        self._ask()
        return [turn, trace] if turn is not None and self._wanted(trace) else []

    def _ask(self) -> None:
        self._submit(str(self._asked), self._opening, 1.0, self._recipe.user_tokens)
        self._asked += 1

    def _submit(self, name: str, prompt: list[int], temperature: float, max_tokens: int) -> None:
        seed = self._recipe.seed * 1_000_003 + int(name)
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, chain_length=0)
        self._engine.submit(Request(name, tuple(prompt), params, domain="healing"))

    def _question(self, trace: Trace) -> list[int]:
        """The prompt that asks for an answer; empty when the turn was empty or did not end."""
        written = trace.tokens[trace.prompt_tokens :]
        if len(written) < 2 or written[-1] not in self._eos:
            return []
        return [*trace.tokens[:-1], *self._answer]

    def _temperature(self, name: str) -> float:
        return self._recipe.temperatures[int(name) % len(self._recipe.temperatures)]

    def _wanted(self, trace: Trace) -> bool:
        text = self._tokenizer.decode(trace.tokens)
        loops = is_degenerate(trace.tokens[trace.prompt_tokens :])
        return not loops and not any(pattern.search(text) for pattern in self._excluded)


def write_corpus(pair: ModelPair, recipe: Recipe, progress: Progress) -> list[Trace]:
    """Let the target write conversations until ``num_tokens`` completion tokens are kept.

    Returns turns, two a conversation: the user's and the answer.

    Raises:
        ModelError: the target writes nothing that can be kept.
    """
    corpus: list[Trace] = []
    started, written, dropped, fruitless = time.monotonic(), 0, 0, 0
    with _Writer(pair, recipe) as writer:
        while written < recipe.num_tokens:
            turns = writer.next()
            if turns is None:
                continue
            if not turns:
                dropped, fruitless = dropped + 1, fruitless + 1
                if fruitless == _MOST_FRUITLESS:
                    raise ModelError(
                        f"The target wrote {fruitless} conversations without one that can be used. "
                        "Raise user_tokens or relax the exclude patterns."
                    )
                continue
            fruitless = 0
            corpus += turns
            written += sum(len(turn.tokens) - turn.prompt_tokens for turn in turns)
            progress(
                {
                    "phase": "write",
                    "tokens": written,
                    "of": recipe.num_tokens,
                    "dropped": dropped,
                    "tokens_per_second": written / (time.monotonic() - started),
                }
            )
    return corpus


def save_corpus(corpus: Sequence[Trace], path: Path) -> None:
    """Write the corpus as one safetensors file: the traces' arrays end to end, and their lengths."""
    save_file(
        {
            "lengths": torch.tensor([len(trace.tokens) for trace in corpus]),
            "prompt_tokens": torch.tensor([trace.prompt_tokens for trace in corpus]),
            "tokens": torch.tensor([token for trace in corpus for token in trace.tokens], dtype=torch.int32),
            "top_ids": torch.cat([torch.from_numpy(trace.top_ids) for trace in corpus]),
            "top_log_probs": torch.cat([torch.from_numpy(trace.top_log_probs) for trace in corpus]).half(),
            "tail_mass": torch.cat([torch.from_numpy(trace.tail_mass) for trace in corpus]),
        },
        path,
    )


def load_corpus(path: Path) -> list[Trace]:
    """Read what ``save_corpus`` wrote."""
    data = load_file(path)
    lengths, prompts = data["lengths"].tolist(), data["prompt_tokens"].tolist()
    judged = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    columns = (data[name].split(judged) for name in ("top_ids", "top_log_probs", "tail_mass"))
    texts = data["tokens"].split(lengths)
    return [_trace(*parts) for parts in zip(texts, prompts, *columns, strict=True)]


def _trace(tokens: Tensor, prompt_tokens: int, top_ids: Tensor, top_log_probs: Tensor, tail_mass: Tensor) -> Trace:
    return Trace(
        request_id="",
        domain="healing",
        tokens=tuple(tokens.tolist()),
        prompt_tokens=prompt_tokens,
        top_ids=top_ids.numpy(),
        top_log_probs=top_log_probs.numpy(),
        tail_mass=tail_mass.numpy(),
        release=0,
        at=datetime.now(UTC),
    )


def _template_parts(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids before the user's words, and between them and the answer, read off the chat template.

    Raises:
        ModelError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ModelError("The target has no chat template, so it cannot write conversations. Choose an instruct model.")
    marker = "\u2402"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False
    )
    before, after = text.split(marker)
    return (
        tokenizer.encode(before, add_special_tokens=False),
        tokenizer.encode(after, add_special_tokens=False),
    )
