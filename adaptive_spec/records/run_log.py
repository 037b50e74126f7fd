"""The log of a run: its states, the turns of its progress, and the last of what its processes printed.

Written in the transaction that changes the run's row, so it is whole whichever process tells, and bounded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import RunLogRow

STATE, PROGRESS, OUTPUT = "state", "progress", "output"
MOST_ENTRIES = 1_000  # of a run; the newest stay
_MOST_LINES, _MOST_CHARACTERS = 200, 500  # of what one process printed, and of each line
_TURNS = ("phase", "domain", "held_out_acceptance_length")  # progress that differs in one of these is worth an entry


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What was told at one time: a state, the progress, or ``lines`` of output."""

    id: int
    at: datetime
    kind: str  # state | progress | output
    detail: dict[str, Any]


def log(session: Session, run_id: int, kind: str, detail: dict[str, Any]) -> None:
    """Add an entry within a transaction of this room."""
    session.add(RunLogRow(run_id=run_id, at=datetime.now(UTC), kind=kind, detail=detail))


def log_progress(session: Session, run_id: int, before: Mapping[str, Any], now: dict[str, Any]) -> None:
    """Add an entry where progress has taken a turn."""
    if any(before.get(name) != now.get(name) for name in _TURNS):
        log(session, run_id, PROGRESS, now)


def log_output(database: Database, run_id: int, text: str) -> None:
    """Add the last lines that a process of the run has printed."""
    lines = [line[:_MOST_CHARACTERS] for line in text.splitlines()[-_MOST_LINES:] if line.strip()]
    if not lines:
        return
    with database.session_scope() as session:
        log(session, run_id, OUTPUT, {"lines": lines})
        of_run = select(RunLogRow.id).where(RunLogRow.run_id == run_id).order_by(RunLogRow.id.desc())
        last = session.scalar(of_run.offset(MOST_ENTRIES).limit(1))
        if last is not None:
            session.execute(delete(RunLogRow).where(RunLogRow.run_id == run_id, RunLogRow.id <= last))


def run_log(database: Database, run_id: int, limit: int = MOST_ENTRIES) -> Sequence[LogEntry]:
    """Return the latest entries, oldest first; none of a run that has told nothing or is not known."""
    query = select(RunLogRow).where(RunLogRow.run_id == run_id).order_by(RunLogRow.id.desc()).limit(limit)
    with database.session_scope(read_only=True) as session:
        found = [LogEntry(row.id, row.at, row.kind, row.detail) for row in session.scalars(query)]
    return found[::-1]
