"""Events: what happened to the service, in the words of an operator.  Written by the writer and by releases."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import EventRow


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One event."""

    id: int
    kind: str
    detail: dict[str, Any]
    domain: str | None
    release: int | None
    at: datetime


def event_row(kind: str, detail: dict[str, Any], domain: str | None, release: int | None) -> dict[str, Any]:
    """Return the event as a row, stamped now."""
    return {"kind": kind, "detail": detail, "domain": domain, "release": release, "at": datetime.now(UTC)}


def add_event(
    database: Database, kind: str, detail: dict[str, Any], domain: str | None = None, release: int | None = None
) -> None:
    """Store one event now.  The decoder's thread uses ``Writer.event`` instead, which never waits."""
    with database.session_scope() as session:
        session.add(EventRow(**event_row(kind, detail, domain, release)))


def list_events(
    database: Database,
    limit: int = 100,
    kind: str | None = None,
    *,
    domain: str | None = None,
    release: int | None = None,
    before: int | None = None,
) -> list[EventRecord]:
    """Return the newest events first: of a kind, a domain, a release, with ids before one."""
    query = select(EventRow).order_by(EventRow.id.desc()).limit(limit)
    wanted = {"kind": kind, "domain": domain, "release": release}
    query = query.where(*(getattr(EventRow, name) == value for name, value in wanted.items() if value is not None))
    if before is not None:
        query = query.where(EventRow.id < before)
    with database.session_scope(read_only=True) as session:
        return [
            EventRecord(row.id, row.kind, row.detail, row.domain, row.release, row.at) for row in session.scalars(query)
        ]
