"""The prompts that ship with the package, split so that what is measured was never served as training traffic."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from adaptive_spec.errors import SettingsError

DOMAINS = ("code", "math", "sql", "tools")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a domain."""

    id: str
    domain: str
    text: str


def prompts(domain: str) -> list[Prompt]:
    """All prompts of a domain, in their fixed order."""
    lines = files("adaptive_spec.bench").joinpath("prompts", f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [Prompt(row["id"], domain, row["prompt"]) for row in rows]


def require_known(domains: Sequence[str]) -> None:
    """Raise SettingsError for a domain that has no prompts."""
    if unknown := sorted(set(domains) - set(DOMAINS)):
        raise SettingsError(f"There are no prompts of {', '.join(unknown)}; choose of: {', '.join(DOMAINS)}.")


def split(domain: str, num_held_out: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return (traffic, held-out): the first ``num_held_out`` prompts are held out, the rest are traffic."""
    rows = prompts(domain)
    return rows[num_held_out:], rows[:num_held_out]
