"""Clients that never stop asking and know every answer: what the target says when it decodes alone."""

import threading
import time
import urllib.error
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.children import PATIENCE
from tests.process import call

MAX_TOKENS = 24
CUT = (OSError, HTTPException)  # the latter: within an answer
PROMPTS = {f"{word} {number}": domain for number in range(6) for word, domain in (("one", "a"), ("two", "b"))}


@torch.no_grad()
def said_by_the_target_alone(folder: Path) -> dict[str, str]:
    """Return the greedy answer to each prompt, decoded without a draft by the model in ``folder``."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    answers = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        start = ids.shape[1]
        for _ in range(MAX_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        answers[prompt] = tokenizer.decode(ids[0, start:])
    return answers


class Traffic:
    """Asks without a pause while it is entered.

    Args:
        answers: by prompt.
        num_clients: that ask at the same time.

    ``answered`` holds the ids of requests whose answer was the target's, ``failed`` what went wrong with the others,
    ``cut`` counts connections that broke, as they do when the service is killed; ``releases`` what has drafted.
    """

    def __init__(self, url: str, answers: dict[str, str], num_clients: int = 2) -> None:
        self.answered: list[str] = []
        self.failed: list[str] = []
        self.cut = 0
        self.releases: set[int] = set()
        self._url, self._answers = url, answers
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int = 4, seconds: float = 120.0) -> None:
        """Wait until so many more requests were answered, so that whatever was done meanwhile has met traffic."""
        goal, deadline = len(self.answered) + count, time.monotonic() + seconds * PATIENCE
        while len(self.answered) < goal:
            assert not self.failed, self.failed[:3]
            assert time.monotonic() < deadline, f"{len(self.answered)} answers, {goal} awaited"
            time.sleep(0.01)

    def check(self) -> None:
        """No request has failed, none was cut, and some were answered."""
        assert self.failed == [] and self.cut == 0 and self.answered

    def _ask(self, number: int) -> None:
        prompts = list(PROMPTS)
        while not self._stopping.is_set():
            prompt = prompts[number % len(prompts)]
            number += 1
            body = {
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "metadata": {"domain": PROMPTS[prompt]},
                "speculation": {"chain_length": 3},
            }
            try:
                answer = call(f"{self._url}/v1/completions", body)
            except urllib.error.HTTPError as error:
                self.failed.append(f"{prompt}: {error.code} {error.read()[:300]!r}")
            except CUT:
                self.cut += 1
                time.sleep(0.05)
            else:
                (choice,) = answer["choices"]
                self.releases.update(answer["speculation"]["releases"])
                if choice["text"] == self._answers[prompt]:
                    self.answered.append(answer["id"])
                else:
                    self.failed.append(f"{prompt}: {choice['text']!r}, not {self._answers[prompt]!r}")
