"""Which rows are old enough to go, and their deletion, a few at a time so that the writer need never wait for long.

Called by ``adaptive_spec.pruning``.  Outcomes go only once they are rolled up, and the newest step never does: ids go
on from it.  Traces have limits of their own (``records.retention``).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, CursorResult, delete, false, func, select
from sqlalchemy.orm import Session

from adaptive_spec.records.database import Database
from adaptive_spec.records.drifts import DRIFT, keep_count
from adaptive_spec.records.rollups import locked_state
from adaptive_spec.records.spans import Rollup, Span, floor
from adaptive_spec.records.tables import (
    CalibrationRow,
    EventRow,
    EvidenceRow,
    RequestCountRow,
    RequestRollupRow,
    RequestRow,
    RollupStateRow,
    StepRollupRow,
    StepRow,
)
from adaptive_spec.settings import RetentionSettings

_BATCH_ROWS = 2_000  # of one transaction
_PAUSE_SECONDS = 0.02  # between two, for those who wait to write
_ROLLUPS: tuple[Rollup, ...] = (StepRollupRow, RequestCountRow, RequestRollupRow)


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """Rows of times before these may go; None: they all stay."""

    outcomes: datetime | None
    minutes: datetime | None
    hours: datetime | None
    evidence: datetime | None
    events: datetime | None
    calibrations: datetime | None


def cutoffs(database: Database, settings: RetentionSettings, now: datetime) -> Cutoffs:
    """Return what the settings say of a database as it is."""

    def before(days: float) -> datetime | None:
        return now - timedelta(days=days) if days else None

    minutes, hours = before(settings.minute_days), before(settings.hour_days)
    hours = min(minutes, hours) if minutes and hours else None  # what is coarser stays at least as long
    outcomes = [at for at in (before(settings.outcome_days), _beyond(database, settings.outcome_steps)) if at]
    return Cutoffs(
        outcomes=max(outcomes, default=None),
        minutes=minutes and floor(minutes, "day"),
        hours=hours and floor(hours, "day"),
        evidence=before(settings.evidence_days),
        events=before(settings.event_days),
        calibrations=before(settings.calibration_days),
    )


class Expiry:
    """Counts or deletes the rows that are due.

    Args:
        stopped: whether to leave the rest to the next time.
    """

    def __init__(self, database: Database, due: Cutoffs, stopped: Callable[[], bool] = lambda: False) -> None:
        self._database = database
        self._due = due
        self._stopped = stopped

    def count(self) -> dict[str, int]:
        """Return how many rows are due, by what they are; outcomes as far as they are rolled up now."""
        with self._database.session_scope(read_only=True) as session:
            state = session.get(RollupStateRow, 1) or RollupStateRow(id=1, last_step=0)
            found = {name: _number(session, *due) for name, due in self._rows(state.last_step).items()}
            for name, span, at in self._spans():
                found[name] = sum(_number(session, table, [table.span == span, table.start < at]) for table in _ROLLUPS)
            return found

    def delete(self) -> dict[str, int]:
        """Delete what is due, and return how many rows that were, by what they are.

        Raises:
            SQLAlchemyError: the database does not answer; what is left goes the next time.
        """
        last_step = self._announce()
        deleted = {}
        for name, (table, conditions) in self._rows(last_step).items():
            deleted[name] = self._repeat(partial(_delete_some, self._database, table, conditions))
        for name, span, at in self._spans():
            deleted[name] = sum(self._repeat(partial(_delete_first, table, span, at)) for table in _ROLLUPS)
        return deleted

    def _announce(self) -> int:
        """Write down from when on everything stays, before the first row goes; return the last step rolled up."""
        with self._database.session_scope() as session:
            state = locked_state(self._database, session)
            for name, at in (("steps", self._due.outcomes), ("minutes", self._due.minutes), ("hours", self._due.hours)):
                since = getattr(state, f"{name}_since")
                if at is not None and (since is None or at > since):
                    setattr(state, f"{name}_since", at)
            return state.last_step

    def _rows(self, last_step: int) -> dict[str, tuple[Any, list[ColumnElement[bool]]]]:
        """Tables and conditions, by name."""
        due = self._due
        newest = select(func.max(StepRow.id)).scalar_subquery()
        latest = select(func.max(CalibrationRow.id)).group_by(CalibrationRow.domain, CalibrationRow.release)
        found: dict[str, tuple[Any, list[ColumnElement[bool]]]] = {}
        if due.outcomes is not None:
            found["steps"] = (StepRow, [StepRow.at < due.outcomes, StepRow.id <= last_step, StepRow.id < newest])
            found["requests"] = (RequestRow, [RequestRow.rolled_up != false(), RequestRow.finished_at < due.outcomes])
        if due.evidence is not None:
            found["evidence"] = (EvidenceRow, [EvidenceRow.at < due.evidence])
        if due.events is not None:
            found["events"] = (EventRow, [EventRow.at < due.events, EventRow.kind != DRIFT])
            found["drifts"] = (EventRow, [EventRow.at < due.events, EventRow.kind == DRIFT])
        if due.calibrations is not None:
            old = [CalibrationRow.created_at < due.calibrations, CalibrationRow.id.not_in(latest)]
            found["calibrations"] = (CalibrationRow, old)
        return found

    def _spans(self) -> list[tuple[str, Span, datetime]]:
        due: tuple[tuple[Span, datetime | None], ...] = (("minute", self._due.minutes), ("hour", self._due.hours))
        return [(f"{span} rollups", span, at) for span, at in due if at is not None]

    def _repeat(self, work: Callable[[Session], int]) -> int:
        """Work in transactions of its own until nothing is left to do."""
        total = 0
        while not self._stopped():
            with self._database.session_scope() as session:
                number = work(session)
            if not number:
                break
            total += number
            time.sleep(_PAUSE_SECONDS)
        return total


def _number(session: Session, table: Any, conditions: list[ColumnElement[bool]]) -> int:
    return session.scalar(select(func.count()).select_from(table).where(*conditions)) or 0


def _beyond(database: Database, num_steps: int) -> datetime | None:
    """Just after the newest step that so many newer ones leave no room for."""
    if not num_steps:
        return None
    query = select(StepRow.at).order_by(StepRow.at.desc()).offset(num_steps).limit(1)
    with database.session_scope(read_only=True) as session:
        at = session.scalar(query)
    return at and at + timedelta(microseconds=1)


def _delete_some(database: Database, table: Any, conditions: list[ColumnElement[bool]], session: Session) -> int:
    (key,) = table.__table__.primary_key
    chosen = list(session.scalars(select(key).where(*conditions).limit(_BATCH_ROWS)))
    if table is EventRow and chosen:
        keep_count(database, session, chosen)
    return _deleted(session, table, key.in_(chosen)) if chosen else 0


def _delete_first(table: Rollup, span: Span, before: datetime, session: Session) -> int:
    """Delete an hour of minutes or a day of hours, the earliest there is."""
    first = session.scalar(select(func.min(table.start)).where(table.span == span, table.start < before))
    if first is None:
        return 0
    end = min(before, first + (timedelta(hours=1) if span == "minute" else timedelta(days=1)))
    return _deleted(session, table, table.span == span, table.start < end)


def _deleted(session: Session, table: Any, *conditions: ColumnElement[bool]) -> int:
    statement = delete(table).where(*conditions).execution_options(synchronize_session=False)
    result = session.execute(statement)
    assert isinstance(result, CursorResult)
    return result.rowcount
