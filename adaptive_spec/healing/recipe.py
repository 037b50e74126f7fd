"""The recipe of a healed draft: everything that decides the result."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from adaptive_spec.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Recipe:
    """How much the target writes, and how the draft is trained on it.

    num_tokens: tokens written and kept.  rows: conversations written at once.  user_tokens, answer_tokens: the longest
    turn.  temperatures: of the answers, in turn; 0 is greedy.  exclude: patterns that no kept conversation matches.
    """

    num_tokens: int = 200_000
    rows: int = 64
    user_tokens: int = 48
    answer_tokens: int = 160
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    exclude: tuple[str, ...] = ()
    top_k: int = 64
    steps: int = 600
    batch_tokens: int = 2048
    learning_rate: float = 1e-3
    loss: str = "lk_hybrid"
    seed: int = 0


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a JSON file.

    Raises:
        SettingsError: an unknown name or unreadable JSON.
    """
    try:
        given = json.loads(path.read_text())
        known = {field.name for field in fields(Recipe)}
        if unknown := given.keys() - known:
            raise SettingsError(f"{path} names unknown settings {sorted(unknown)}; known: {', '.join(sorted(known))}.")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        return Recipe(**values)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise SettingsError(f"{path} is not a readable recipe ({error}). Correct the file.") from error
