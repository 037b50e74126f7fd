"""The rows of canaries: which release is on trial, against which, and how it ended; and what its requests showed.

At most one runs, which a unique index sees to.  Everything that a decision needs is here, so any process may judge, a
restart changes nothing, and of several that end one canary the first has its way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, literal, select
from sqlalchemy.orm import Session

from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import event_row
from adaptive_spec.records.notify import notify
from adaptive_spec.records.releases import check_may_go_live, close_canary, make_live
from adaptive_spec.records.tables import CanaryRow, EventRow, ReleaseRow, RequestRow, StepRow

RUNNING, PROMOTED, ROLLED_BACK, ABORTED = "running", "promoted", "rolled_back", "aborted"


@dataclass(frozen=True, slots=True)
class CanaryRecord:
    """One trial.  ``live`` is the release that serves all other requests; ``report`` the latest verdict's numbers."""

    id: int
    release: int
    live: int
    share: float
    state: str  # running | promoted | rolled_back | aborted: a person's, or another release went live
    reason: str
    report: dict[str, Any]
    started_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that one release served whole, without the step of its prompt.

    decoder_seconds: its share of the time of its steps, each divided by the rows that took part.
    """

    request_id: str
    domain: str
    release: int
    num_steps: int
    num_accepted: int
    num_emitted: int
    decoder_seconds: float
    finished_at: datetime


def begin_canary(database: Database, release: int, share: float, reason: str) -> None:
    """Put a release on trial beside the live one.

    Raises:
        ReleaseError: it is unknown, was refused or is live; another one is on trial.
    """
    with database.session_scope() as session:
        row = session.get(ReleaseRow, release, with_for_update=True)
        if row is None or row.state == "live":
            raise ReleaseError(f"Release {release} cannot be tried: it is {row.state if row else 'unknown'}.")
        check_may_go_live(session, row)
        if (other := _running(session)) is not None:
            raise ReleaseError(f"Release {other.release} is on trial; end that first (adaptive-spec releases canary).")
        live = session.scalar(select(ReleaseRow.version).where(ReleaseRow.state == "live")) or 0
        row.state = "canary"
        now = datetime.now(UTC)
        session.add(
            CanaryRow(release=release, live=live, share=share, state=RUNNING, reason=reason, report={}, started_at=now)
        )
        detail = {"live": live, "share": share, "reason": reason}
        session.add(EventRow(**event_row("canary_started", detail, None, release)))
        notify(session)


def end_canary(database: Database, canary: int, state: str, reason: str, report: dict[str, Any]) -> bool:
    """End a canary that runs: ``promoted`` makes its release live, else it is rolled back.

    Returns whether this call ended it; somebody else may have.
    """
    with database.session_scope() as session:
        row = session.get(CanaryRow, canary, with_for_update=True)
        if row is None or row.state != RUNNING:
            return False
        row.report = report or row.report
        if state == PROMOTED:
            make_live(session, row.release, reason)  # ends the canary, too
        else:
            close_canary(session, row, state, reason)
            notify(session)
        return True


def note_canary(database: Database, canary: int, report: dict[str, Any]) -> None:
    """Keep the latest verdict of a canary that runs."""
    with database.session_scope() as session:
        row = session.get(CanaryRow, canary, with_for_update=True)
        if row is not None and row.state == RUNNING:
            row.report = report


def running_canary(database: Database) -> CanaryRecord | None:
    """Return the canary that runs."""
    with database.session_scope(read_only=True) as session:
        row = _running(session)
        return None if row is None else _record(row)


def standing(database: Database) -> tuple[int, CanaryRecord | None]:
    """Return the live version and the canary that runs, as one transaction left them."""
    query = (
        select(CanaryRow, select(ReleaseRow.version).where(ReleaseRow.state == "live").scalar_subquery())
        .select_from(select(literal(1).label("one")).subquery())
        .outerjoin(CanaryRow, CanaryRow.state == RUNNING)
    )
    with database.session_scope(read_only=True) as session:
        row, live = session.execute(query).one()
        return live or 0, None if row is None else _record(row)


def list_canaries(database: Database, limit: int = 20) -> list[CanaryRecord]:
    """Return the latest canaries, newest first."""
    with database.session_scope(read_only=True) as session:
        rows = session.scalars(select(CanaryRow).order_by(CanaryRow.id.desc()).limit(limit))
        return [_record(row) for row in rows]


def served_requests(
    database: Database, releases: Sequence[int], started_after: datetime, finished_after: datetime
) -> list[ServedRequest]:
    """Return the requests that one of these releases served whole, under the length policy, in order of their ends.

    Without those that were cut short or answered out of the cache.
    """
    query = (
        select(
            StepRow.request_id,
            RequestRow.domain,
            RequestRow.first_release,
            func.count(),
            func.sum(StepRow.num_accepted),
            func.sum(StepRow.num_emitted),
            func.sum((StepRow.draft_seconds + StepRow.verify_seconds) / StepRow.batch_size),
            RequestRow.finished_at,
        )
        .join(RequestRow, RequestRow.request_id == StepRow.request_id)
        .where(
            RequestRow.finished_at > finished_after,
            RequestRow.started_at >= started_after,
            RequestRow.first_release == RequestRow.last_release,
            RequestRow.first_release.in_(list(releases)),
            RequestRow.policy == "policy",
            RequestRow.finish_reason.in_(("stop", "length")),
            StepRow.step_index > 0,
        )
        .group_by(StepRow.request_id, RequestRow.domain, RequestRow.first_release, RequestRow.finished_at)
        .order_by(RequestRow.finished_at, StepRow.request_id)
    )
    with database.session_scope(read_only=True) as session:
        return [ServedRequest(*row) for row in session.execute(query)]


def _running(session: Session) -> CanaryRow | None:
    return session.scalar(select(CanaryRow).where(CanaryRow.state == RUNNING))


def _record(row: CanaryRow) -> CanaryRecord:
    return CanaryRecord(
        row.id,
        row.release,
        row.live,
        row.share,
        row.state,
        row.reason,
        row.report,
        row.started_at,
        row.ended_at,
    )
