"""The rows of releases, and which of them is live.  Called by the registry, which owns the folders.

A release goes live by changing one row in one transaction; a unique index lets at most one row be live.  Release 0
is the untouched draft: it has no row and is live when no row is.  docs/releases.md draws the states and who may change
them; ``set_live`` holds every process to it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from adaptive_spec.errors import ReleaseError
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import event_row
from adaptive_spec.records.notify import notify
from adaptive_spec.records.tables import CanaryRow, EventRow, ReleaseRow

RELEASE_LIVE = "release_live"  # kind of event
OVERRIDE = "override"  # in a release's report: who published it over which refusal
STATES = (
    "candidate",
    "refused",
    "canary",
    "live",
    "retired",
    "rolled_back",
    "expired",
)  # expired: its bundle is deleted
_BY_ITSELF = ("candidate", "canary", "live", "retired")  # from these states a process may put it live unasked


@dataclass(frozen=True, slots=True)
class ReleaseRecord:
    """One release as the database knows it."""

    version: int
    folder: str | None
    parent: int | None
    state: str  # one of STATES
    report: dict[str, Any]
    created_at: datetime


def add_release(
    database: Database,
    version: int,
    folder: str | None,
    parent: int | None,
    report: dict[str, Any],
    state: str = "candidate",
) -> None:
    """Store a new release.  Only ``set_live`` makes it live.

    Raises:
        ReleaseError: the version is taken or not positive, or the state cannot be given to a new release.
    """
    if version < 1:
        raise ReleaseError(f"Release {version} cannot be stored: versions start at 1. Ask next_version() for one.")
    if state not in ("candidate", "refused"):
        raise ReleaseError(f"A new release cannot be {state!r}. Store it as a candidate, then set it live.")
    with database.session_scope() as session:
        if session.get(ReleaseRow, version) is not None:
            raise ReleaseError(f"Release {version} exists already. Ask next_version() for a new one.")
        session.add(
            ReleaseRow(
                version=version,
                folder=folder,
                parent=parent,
                state=state,
                report=report,
                created_at=datetime.now(UTC),
            )
        )


def set_live(
    database: Database, version: int, reason: str, *, by_person: bool = False, over_refusal: Sequence[str] = ()
) -> None:
    """Make a release live and record why.  The release it replaces is retired, or rolled back if it is newer.

    Args:
        by_person: somebody named this very version.  Without it, no release goes live that was rolled back, nor a new
            one whose parent was: what it was made of has been found wanting meanwhile.
        over_refusal: the checks of the gate that a person overrides with ``reason``; kept in the release's report.

    Raises:
        ReleaseError: the release is unknown, was refused, must not go live by itself, or its bundle is deleted.
    """
    with database.session_scope() as session:
        make_live(session, version, reason, by_person=by_person, over_refusal=over_refusal)


def make_live(
    session: Session, version: int, reason: str, *, by_person: bool = False, over_refusal: Sequence[str] = ()
) -> None:
    """As ``set_live``, within a transaction of this room.  A canary, which was compared with the old one, ends."""
    row = session.get(ReleaseRow, version, with_for_update=True)
    if version != 0 and row is None:
        raise ReleaseError(f"Release {version} is unknown. `adaptive-spec releases` lists those that exist.")
    if row is not None:
        check_may_go_live(session, row, by_person=by_person, forced=bool(over_refusal))
    before = _demote_live(session, version)
    if row is not None and over_refusal:
        override = {"reason": reason, "checks": list(over_refusal), "at": datetime.now(UTC).isoformat()}
        row.report = {**row.report, OVERRIDE: override}
        session.add(EventRow(**event_row("release_forced", override, None, version)))
    if row is not None:
        row.state = "live"
    _end_canary(session, version, reason)
    detail = {"reason": reason, "before": before}
    session.add(EventRow(**event_row(RELEASE_LIVE, detail, None, version)))
    notify(session)


def live_version(database: Database) -> int:
    """Return the live release's version; 0 when it is the untouched draft."""
    with database.session_scope(read_only=True) as session:
        return session.scalar(select(ReleaseRow.version).where(ReleaseRow.state == "live")) or 0


def list_releases(
    database: Database, limit: int | None = None, *, state: str | None = None, before: int | None = None
) -> list[ReleaseRecord]:
    """Return the stored releases, newest version first: in a state, with versions before one."""
    query = select(ReleaseRow).order_by(ReleaseRow.version.desc()).limit(limit)
    if state is not None:
        query = query.where(ReleaseRow.state == state)
    if before is not None:
        query = query.where(ReleaseRow.version < before)
    with database.session_scope(read_only=True) as session:
        return [_record(row) for row in session.scalars(query)]


def get_release(database: Database, version: int) -> ReleaseRecord:
    """Return one stored release.

    Raises:
        ReleaseError: there is none of that version; 0 is never stored.
    """
    with database.session_scope(read_only=True) as session:
        row = session.get(ReleaseRow, version)
        if row is None:
            raise ReleaseError(f"Release {version} is unknown. `adaptive-spec releases` lists those that exist.")
        return _record(row)


def same_draft(database: Database, version: int) -> frozenset[int]:
    """Return the releases that draft with the weights of this one: calibrations of one another, itself included."""
    records = {record.version: record for record in list_releases(database)}

    def origin(of: int) -> int:
        while of in records and records[of].report.get("kind") == "calibration":
            of = records[of].parent or 0
        return of

    return frozenset(other for other in (0, *records) if origin(other) == origin(version)) | {version}


def live_before(database: Database) -> int:
    """Return the release that the live one took the place of; 0 where that is not told."""
    query = select(EventRow.detail).where(EventRow.kind == RELEASE_LIVE).order_by(EventRow.id.desc()).limit(1)
    with database.session_scope(read_only=True) as session:
        return int((session.scalar(query) or {}).get("before", 0))


def expire_release(database: Database, version: int, states: Collection[str]) -> bool:
    """Mark that a release's bundle is deleted, before it is; False when it is in none of these states any more."""
    with database.session_scope() as session:
        row = session.get(ReleaseRow, version, with_for_update=True)
        if row is None or row.state not in (*states, "expired"):
            return False
        row.state, row.folder = "expired", None
        return True


def next_version(database: Database) -> int:
    """Return the smallest version above all stored ones."""
    with database.session_scope(read_only=True) as session:
        return (session.scalar(select(func.max(ReleaseRow.version))) or 0) + 1


def _end_canary(session: Session, version: int, reason: str) -> None:
    canary = session.scalar(select(CanaryRow).where(CanaryRow.state == "running").with_for_update())
    if canary is None:
        return
    if canary.release == version:
        close_canary(session, canary, "promoted", reason)
    else:
        close_canary(session, canary, "aborted", f"release {version} went live: {reason}")


def close_canary(session: Session, canary: CanaryRow, state: str, reason: str) -> None:
    """Write down how a trial ended.  A release that was not promoted is rolled back."""
    canary.state, canary.reason, canary.ended_at = state, reason, datetime.now(UTC)
    tried = session.get(ReleaseRow, canary.release)
    if tried is not None and state != "promoted":
        tried.state = "rolled_back"
    detail = {"live": canary.live, "reason": reason}
    session.add(EventRow(**event_row(f"canary_{state}", detail, None, canary.release)))


def check_may_go_live(session: Session, row: ReleaseRow, *, by_person: bool = False, forced: bool = False) -> None:
    """Refuse what may not serve, inside the unit of work that would let it.

    Args:
        by_person: somebody has named the release, so that it may have been rolled back before.
        forced: also over the gate's refusal.

    Raises:
        ReleaseError: it may not.
    """
    if row.state == "expired":
        raise ReleaseError(f"The bundle of release {row.version} was deleted (retention.releases). Choose another one.")
    if row.state == "refused" and not (by_person and forced):
        raise ReleaseError(f"Release {row.version} was refused by the gate and cannot go live. Choose another one.")
    if by_person:
        return
    if row.state not in _BY_ITSELF:
        raise ReleaseError(f"Release {row.version} was rolled back. Only a person puts it live again, by its number.")
    parent = session.get(ReleaseRow, row.parent) if row.state == "candidate" and row.parent else None
    if parent is not None and parent.state == "rolled_back":
        raise ReleaseError(
            f"Release {row.version} builds on release {parent.version}, which was rolled back meanwhile. Retrain, or "
            "recalibrate, on what is live now."
        )


def _record(row: ReleaseRow) -> ReleaseRecord:
    return ReleaseRecord(row.version, row.folder, row.parent, row.state, row.report, row.created_at)


def _demote_live(session: Session, version: int) -> int:
    live = session.scalar(select(ReleaseRow).where(ReleaseRow.state == "live").with_for_update())
    if live is None:
        return 0
    if live.version != version:
        live.state = "rolled_back" if version < live.version else "retired"
        session.flush()  # before the other row turns live: the unique index sees every statement
    return live.version
