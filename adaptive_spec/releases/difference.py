"""What differs between two releases, field by field: thresholds, provenance, and what the gate said of them.

Pure: two descriptions as ``GET /api/releases/N`` gives them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PARTS = ("thresholds", "provenance", "gate")
MISSING = None


@dataclass(frozen=True, slots=True)
class Difference:
    """One field; a side that lacks it has None.  path: names and places from the part on, joined by dots."""

    part: str
    path: str
    before: Any
    after: Any


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    """Return every field of ``PARTS`` that is not the same in both, in the order of their paths."""
    found = []
    for part in PARTS:
        old, new = (dict(_fields("", side.get(part) or {})) for side in (before, after))
        for path in sorted(old.keys() | new.keys()):
            values = old.get(path, MISSING), new.get(path, MISSING)
            if values[0] != values[1]:
                found.append(Difference(part, path, *values))
    return found


def _fields(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested objects.  Lists of named things go by their names, other lists are leaves."""
    named = isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value)
    if named:
        value = {str(item.get("name") or item.get("domain") or place): item for place, item in enumerate(value)}
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, item in value.items():
        yield from _fields(f"{path}.{name}" if path else str(name), item)
