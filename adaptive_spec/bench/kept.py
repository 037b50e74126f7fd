"""Records of a long bench as JSON lines: written one by one, so that an interrupted bench goes on from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_kept(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file, none if it is not there; a last line that a kill cut short is left out."""
    records: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def rewrite(file: Path, records: Sequence[dict[str, Any]]) -> None:
    """Let a file hold these records and no others."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def append(file: Path, record: dict[str, Any]) -> None:
    """Add a record to a file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")
