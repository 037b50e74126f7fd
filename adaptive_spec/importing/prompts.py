"""Prompts out of a JSONL file.  Reads and checks lines; knows nothing of models."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptive_spec.errors import RequestError

_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a line asks: a text, or messages with role and content."""

    line: int
    content: str | tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a line cannot be used."""

    line: int
    reason: str


def read_prompts(path: Path) -> tuple[list[Prompt], list[Problem]]:
    """Read a JSONL file of ``{"prompt": text}`` or ``{"messages": […]}``; other keys are passed over.

    A bad line is a problem, and costs no other.  A last message of the assistant is left out; the target writes its
    own.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}. Name a JSONL file of prompts.") from error
    prompts, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(Prompt(number, _content(line)))
        except ValueError as error:
            problems.append(Problem(number, str(error)))
    return prompts, problems


def _content(line: bytes) -> str | tuple[dict[str, str], ...]:
    """What a line asks.  Raises ValueError saying what is wrong."""
    try:
        row = json.loads(line)
    except ValueError as error:  # bytes that are not UTF-8 too
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ValueError('neither {"prompt": text} nor {"messages": [...]}')
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise ValueError("prompt is not a text, or is empty")
        return str(row["prompt"])
    messages = row["messages"]
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(f"messages is not a list of role ({', '.join(_ROLES)}) and content (a text)")
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        raise ValueError("messages asks nothing")
    return tuple(
        {"role": "system" if message["role"] == "developer" else message["role"], "content": message["content"]}
        for message in messages
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in _ROLES and isinstance(value.get("content"), str)
