"""Thresholds that persons have set, one row per domain while they are in force; events keep who set what, and why.

Their times are the database's: whatever a process's own clock says, all let go of an override together.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select

from adaptive_spec.core import ThresholdOverride
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import event_row
from adaptive_spec.records.locks import LockKey
from adaptive_spec.records.notify import notify
from adaptive_spec.records.tables import EventRow, ThresholdOverrideRow

OVERRIDDEN, RESTORED = "thresholds_overridden", "thresholds_restored"  # kinds of events


@dataclass(frozen=True, slots=True)
class OverrideRecord:
    """One override in force.  seconds_left: by the database's clock, when it was read."""

    domain: str
    override: ThresholdOverride
    reason: str
    begun_at: datetime
    until: datetime
    seconds_left: float


def set_override(
    database: Database, domain: str, override: ThresholdOverride, reason: str, lasts: timedelta
) -> OverrideRecord:
    """Put an override in force, in place of the one that the domain has, and tell every decoder."""
    with database.session_scope() as session:
        database.take_turns(session, LockKey.OVERRIDES)
        now = database.clock(session)
        before = session.get(ThresholdOverrideRow, domain, with_for_update=True)
        detail: dict[str, Any] = {"numbers": override.numbers, "reason": reason, "until": (now + lasts).isoformat()}
        if before is not None:
            detail["before"] = before.numbers
        row = ThresholdOverrideRow(
            domain=domain, numbers=override.numbers, reason=reason, begun_at=now, until=now + lasts
        )
        session.merge(row)
        session.add(EventRow(**event_row(OVERRIDDEN, detail, domain, None)))
        notify(session)
        return _record(row, now)


def clear_override(database: Database, domain: str, reason: str) -> bool:
    """End a domain's override and tell every decoder; False when none is in force."""
    with database.session_scope() as session:
        row = session.get(ThresholdOverrideRow, domain, with_for_update=True)
        if row is None or row.until <= database.clock(session):
            return False
        session.delete(row)
        session.add(EventRow(**_restored(row, reason)))
        notify(session)
        return True


def standing_overrides(database: Database) -> list[OverrideRecord]:
    """Return those in force, sorted by domain."""
    with database.session_scope(read_only=True) as session:
        now = database.clock(session)
        rows = session.scalars(select(ThresholdOverrideRow).order_by(ThresholdOverrideRow.domain))
        return [_record(row, now) for row in rows if row.until > now]


def end_expired(database: Database) -> None:
    """Take what has expired off the table and write its event, once whoever calls."""
    with database.session_scope(read_only=True) as session:
        due = select(ThresholdOverrideRow).where(ThresholdOverrideRow.until <= database.clock(session))
        if session.scalar(due.limit(1)) is None:  # nearly always: no lock is taken
            return
    with database.session_scope() as session:
        due = select(ThresholdOverrideRow).where(ThresholdOverrideRow.until <= database.clock(session))
        for row in session.scalars(due.with_for_update(skip_locked=True)):
            session.delete(row)
            session.add(EventRow(**_restored(row, "expired")))


def _restored(row: ThresholdOverrideRow, reason: str) -> dict[str, Any]:
    return event_row(RESTORED, {"numbers": row.numbers, "reason": reason}, row.domain, None)


def _record(row: ThresholdOverrideRow, now: datetime) -> OverrideRecord:
    left = (row.until - now).total_seconds()
    return OverrideRecord(row.domain, ThresholdOverride(**row.numbers), row.reason, row.begun_at, row.until, left)
