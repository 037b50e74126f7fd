"""What drift detection reads: outcomes in the order they were recorded, finished requests, drifts told before."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import DriftCountRow, EventRow, RequestRow, StepRow

DRIFT, DRIFT_ANSWER = "drift", "drift_answer"  # kinds of events


@dataclass(frozen=True, slots=True)
class Outcome:
    """One step that drafted.  confidences: [num_reached], uncalibrated."""

    step_id: int
    request_id: str
    domain: str
    drafter: str
    verifier: str
    num_reached: int
    num_accepted: int  # of the reached positions
    confidences: Any
    request_temperature: float


def outcomes_after(database: Database, release: int, step_id: int, limit: int) -> list[Outcome]:
    """Return a release's steps with at least one reached position and an id above ``step_id``, oldest first."""
    query = (
        select(
            StepRow.id,
            StepRow.request_id,
            StepRow.domain,
            StepRow.drafter,
            StepRow.verifier,
            StepRow.num_reached,
            StepRow.num_reached_accepted,
            StepRow.confidences,
            StepRow.request_temperature,
        )
        .where(StepRow.id > step_id, StepRow.release == release, StepRow.num_reached > 0)
        .order_by(StepRow.id)
        .limit(limit)
    )
    with database.session_scope(read_only=True) as session:
        return [Outcome(*row) for row in session.execute(query)]


def step_before_newest(database: Database, release: int, num_steps: int) -> int:
    """Return the id of the step before a release's newest so many; 0 when there are no more than those."""
    query = (
        select(StepRow.id)
        .where(StepRow.release == release, StepRow.num_reached > 0)
        .order_by(StepRow.id.desc())
        .offset(num_steps)
        .limit(1)
    )
    with database.session_scope(read_only=True) as session:
        return session.scalar(query) or 0


def finished_requests(database: Database, request_ids: Collection[str]) -> set[str]:
    """Return those that have ended."""
    if not request_ids:
        return set()
    query = select(RequestRow.request_id).where(RequestRow.request_id.in_(list(request_ids)))
    with database.session_scope(read_only=True) as session:
        return set(session.scalars(query))


def drift_counts(database: Database) -> dict[tuple[str, str, str], int]:
    """Return how often each (domain, stream, direction) drifted, over all records, deleted ones included."""
    with database.session_scope(read_only=True) as session:
        found = Counter(_told(session))
        for row in session.scalars(select(DriftCountRow)):
            found[row.domain, row.stream, row.direction] += row.num_drifts
    return dict(found)


def keep_count(database: Database, session: Session, event_ids: Collection[int]) -> None:
    """Add the drifts among events to those that are deleted; in the transaction that deletes them."""
    key = ("domain", "stream", "direction")
    told = _told(session, EventRow.id.in_(list(event_ids)))
    rows = [dict(zip((*key, "num_drifts"), (*kind, number), strict=True)) for kind, number in told.items()]
    if not rows:
        return
    insert = (sqlite.insert if database.is_sqlite else postgresql.insert)(DriftCountRow).values(rows)
    more = {"num_drifts": DriftCountRow.num_drifts + insert.excluded.num_drifts}
    session.execute(insert.on_conflict_do_update(index_elements=key, set_=more))


def _told(session: Session, *conditions: ColumnElement[bool]) -> dict[tuple[str, str, str], int]:
    stream, direction = EventRow.detail["stream"].as_string(), EventRow.detail["direction"].as_string()
    query = (
        select(EventRow.domain, stream.label("stream"), direction.label("direction"), func.count())
        .where(EventRow.kind == DRIFT, *conditions)
        .group_by("domain", "stream", "direction")
    )
    return {(row[0] or "", row[1], row[2]): int(row[3]) for row in session.execute(query)}
