"""Training runs.  The service creates them, the run's own process reports progress here, everybody may look.

A process that may not train asks for a run: a row that is ``requested``, which the one that leads claims.
"""

import os
import socket
from collections.abc import Collection, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session, object_session

from adaptive_spec.errors import RunError
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import event_row
from adaptive_spec.records.locks import LockKey
from adaptive_spec.records.notify import notify
from adaptive_spec.records.run_log import STATE, log, log_progress
from adaptive_spec.records.tables import DecoderRow, EventRow, RunRow, TraceRow

REQUESTED = "requested"
STARTED = ("queued", "running")
ACTIVE = (REQUESTED, *STARTED)
FINISHED = ("passed", "refused", "failed", "cancelled")
_SILENCE = timedelta(hours=1)  # after which a run that this machine cannot look at is held for dead


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One training run."""

    id: int
    trigger: str
    state: str  # requested | queued | running | passed | refused | failed | cancelled
    created_at: datetime
    finished_at: datetime | None
    progress: dict[str, Any]
    error: str | None
    release: int | None
    report: dict[str, Any]
    settings: dict[str, Any]
    pid: int | None
    cancel_reason: str | None = None  # somebody's who wants it ended


@dataclass(frozen=True, slots=True)
class RunGain:
    """What a run that learned to its end gained on held-out requests, whether or not it passed the gate.

    num_new_traces: to train on, that came after the run before it.  gain_share: of the acceptance length of the release
    that was live; gain_share_high: the upper end of its 95 % interval over requests.
    """

    num_new_traces: int
    gain_share: float
    gain_share_high: float


def create_run(database: Database, trigger: str, settings: dict[str, Any], *, alone: bool = False) -> int:
    """Store a queued run and return its number.

    Args:
        alone: only if no other is active, whoever else tries at the same moment.

    Raises:
        RunError: another one is active, and this one should be alone.
    """
    row = _new(trigger, "queued", settings)
    row.pid = os.getpid()  # until the run has a process of its own
    with database.session_scope() as session:
        if alone:
            _refuse_second(database, session)
        session.add(row)
        session.flush()
        return row.id


def request_run(database: Database, trigger: str) -> int:
    """Ask whoever leads for a run, and return its number.  Settings are those of who claims it.

    Raises:
        RunError: another one is active, or asked for already.
    """
    row = _new(trigger, REQUESTED, {})
    with database.session_scope() as session:
        _refuse_second(database, session)
        session.add(row)
        session.flush()
        notify(session)
        return row.id


def requested_run(database: Database) -> int | None:
    """Return the run that was asked for and waits to be claimed."""
    query = select(RunRow.id).where(RunRow.state == REQUESTED).order_by(RunRow.id).limit(1)
    with database.session_scope(read_only=True) as session:
        return session.scalar(query)


def claim_run(database: Database, settings: dict[str, Any]) -> int | None:
    """Queue the run that was asked for, as this process's own; None when there is none, or another one has started.

    Args:
        settings: of a new run; one that is to go on keeps its own.
    """
    with database.session_scope() as session:
        database.take_turns(session, LockKey.RUNS)
        active = session.scalars(select(RunRow).where(RunRow.state.in_(ACTIVE)).order_by(RunRow.id)).all()
        if not active or any(row.state in STARTED for row in active):
            return None
        row = active[0]
        row.settings = row.settings or settings
        _queue(row, "queued")
        return row.id


def update_run(
    database: Database,
    run_id: int,
    *,
    state: str | None = None,
    progress: dict[str, Any] | None = None,
    error: str | None = None,
    release: int | None = None,
    report: dict[str, Any] | None = None,
    pid: int | None = None,
) -> None:
    """Change what is given; a report adds to what is there.

    A cancelled run stays cancelled, whatever its process still reports.

    Raises:
        RunError: the run or the state is unknown.
    """
    if state is not None and state not in ACTIVE + FINISHED:
        raise RunError(f"Unknown run state {state!r}. Use one of {', '.join(ACTIVE + FINISHED)}.")
    given = {"progress": progress, "error": error, "release": release, "pid": pid}
    with database.session_scope() as session:
        row = session.get(RunRow, run_id, with_for_update=True)
        if row is None:
            raise _unknown(run_id)
        if progress is not None:
            log_progress(session, run_id, row.progress, progress)
        for name, value in given.items():
            if value is not None:
                setattr(row, name, value)
        if report is not None:
            row.report = {**row.report, **report}
        if pid is not None:
            row.host = socket.gethostname()
        if state is not None and row.state != "cancelled":
            _change_state(row, state)
        row.updated_at = datetime.now(UTC)


def cancel_run(database: Database, run_id: int, reason: str) -> str:
    """Have a run ended, whichever process runs it, and return its state: one that nobody has begun is ``cancelled``.

    Raises:
        RunError: it is unknown, or has ended.
    """
    with database.session_scope() as session:
        database.take_turns(session, LockKey.RUNS)
        row = session.get(RunRow, run_id, with_for_update=True)
        if row is None:
            raise _unknown(run_id)
        if row.state in FINISHED:
            raise RunError(f"Run {run_id} is {row.state} already; only an active one can be cancelled.")
        row.cancel_reason = reason
        if row.state == REQUESTED:
            row.error = f"Cancelled: {reason}"
            _change_state(row, "cancelled")
        session.add(EventRow(**event_row("run_cancelled", {"run": run_id, "reason": reason}, None, None)))
        notify(session)
        return row.state


def reopen_run(database: Database, run_id: int, *, ask: bool = False) -> None:
    """Queue a run again that was interrupted, and count it: ``num_resumptions`` of the report.

    Args:
        ask: whoever leads to go on with it, instead of this process.

    Raises:
        RunError: the run is unknown, active, or has passed the gate or failed at it; or another one is active.
    """
    with database.session_scope() as session:
        database.take_turns(session, LockKey.RUNS)
        row = session.get(RunRow, run_id, with_for_update=True)
        if row is None:
            raise _unknown(run_id)
        if row.state not in ("failed", "cancelled"):
            raise RunError(f"Run {run_id} is {row.state}; only one that was cut short goes on. Start a new run.")
        _refuse_second(database, session)
        row.report = {**row.report, "num_resumptions": row.report.get("num_resumptions", 0) + 1}
        row.error = None
        _queue(row, REQUESTED if ask else "queued")
        if ask:
            notify(session)


def get_run(database: Database, run_id: int) -> RunRecord:
    """Return one run.

    Raises:
        RunError: it is unknown.
    """
    with database.session_scope(read_only=True) as session:
        row = session.get(RunRow, run_id)
        if row is None:
            raise _unknown(run_id)
        return _record(row)


def list_runs(
    database: Database,
    limit: int = 100,
    *,
    state: str | None = None,
    trigger: str | None = None,
    before: int | None = None,
) -> list[RunRecord]:
    """Return the newest first: in a state, of a trigger, with numbers before one."""
    query = select(RunRow).order_by(RunRow.id.desc()).limit(limit)
    wanted = {"state": state, "trigger": trigger}
    query = query.where(*(getattr(RunRow, name) == value for name, value in wanted.items() if value is not None))
    if before is not None:
        query = query.where(RunRow.id < before)
    with database.session_scope(read_only=True) as session:
        return [_record(row) for row in session.scalars(query)]


def learned_until(database: Database, releases: Collection[int]) -> datetime | None:
    """Return when the last run began that made one of these releases: what came later, they have not learned."""
    query = select(RunRow.created_at).where(RunRow.state == "passed", RunRow.release.in_(releases))
    with database.session_scope(read_only=True) as session:
        return session.scalar(query.order_by(RunRow.id.desc()).limit(1))


def last_begun(database: Database, states: Collection[str] = ()) -> datetime | None:
    """Return when the last run began; of these states, where any are named."""
    query = select(RunRow.created_at).order_by(RunRow.id.desc()).limit(1)
    with database.session_scope(read_only=True) as session:
        return session.scalar(query.where(RunRow.state.in_(states)) if states else query)


def last_gains(database: Database, since: datetime, limit: int = 2) -> tuple[RunGain, ...]:
    """Return what the last runs gained that began since then and learned to their end, the newest first.

    Those that had too few held-out requests to measure it are left out.
    """
    query = select(RunRow).where(RunRow.state.in_(("passed", "refused")), RunRow.created_at >= since)
    with database.session_scope(read_only=True) as session:
        rows = session.scalars(query.order_by(RunRow.id.desc()).limit(limit))
        return tuple(RunGain(**row.report["gain"]) for row in rows if row.report.get("gain"))


def ended_before(database: Database, run_ids: Collection[int], at: datetime) -> list[int]:
    """Return those of the runs that ended before a time, sorted."""
    query = select(RunRow.id).where(RunRow.id.in_(list(run_ids)), RunRow.finished_at < at).order_by(RunRow.id)
    with database.session_scope(read_only=True) as session:
        return list(session.scalars(query))


def count_traces(database: Database, since: datetime | None = None) -> int:
    """Return how many traces there are to train on, or came since then."""
    query = select(func.count()).select_from(TraceRow).where(TraceRow.held_out.is_(False))
    with database.session_scope(read_only=True) as session:
        return session.scalar(query if since is None else query.where(TraceRow.at >= since)) or 0


def active_run(database: Database) -> RunRecord | None:
    """Return the oldest run that is asked for, queued or running."""
    query = select(RunRow).where(RunRow.state.in_(ACTIVE)).order_by(RunRow.id).limit(1)
    with database.session_scope(read_only=True) as session:
        row = session.scalar(query)
        return None if row is None else _record(row)


def fail_orphans(database: Database, *, gone_seconds: float | None = None) -> list[int]:
    """Mark active runs whose process is gone as failed; return their numbers.  A run that was asked for has none yet.

    A process is looked up on its own machine only.  Runs of another machine count as gone after an hour without a sign
    of life, or once no process of the service has given a sign there for so long as ``gone_seconds``.
    """
    with database.session_scope() as session:
        silent = set() if gone_seconds is None else _silent_hosts(database, session, gone_seconds)
        started = session.scalars(select(RunRow).where(RunRow.state.in_(STARTED)).order_by(RunRow.id))
        orphans = [row for row in started if _is_gone(row, silent)]
        for row in orphans:
            row.error = "The run's process ended without a result. Start a new run, or go on with this one (--resume)."
            _change_state(row, "failed")
        return [row.id for row in orphans]


def _new(trigger: str, state: str, settings: dict[str, Any]) -> RunRow:
    now = datetime.now(UTC)
    return RunRow(
        trigger=trigger,
        state=state,
        settings=settings,
        progress={},
        report={},
        host=socket.gethostname(),
        created_at=now,
        updated_at=now,
    )


def _refuse_second(database: Database, session: Session) -> None:
    """Make sure, until this unit of work ends, that no run is active."""
    database.take_turns(session, LockKey.RUNS)
    active = session.scalar(select(RunRow).where(RunRow.state.in_(ACTIVE)).order_by(RunRow.id).limit(1))
    if active is not None:
        raise RunError(f"Run {active.id} is {active.state}; wait for it (adaptive-spec runs).")


def _queue(row: RunRow, state: str) -> None:
    row.pid, row.host = os.getpid(), socket.gethostname()
    row.updated_at = datetime.now(UTC)
    row.cancel_reason = None
    _change_state(row, state)


def _change_state(row: RunRow, state: str) -> None:
    session = object_session(row)
    assert session is not None
    if row.state != state:
        log(session, row.id, STATE, {"state": state, **({"error": row.error} if row.error else {})})
    row.state = state
    row.finished_at = datetime.now(UTC) if state in FINISHED else None


def _silent_hosts(database: Database, session: Session, gone_seconds: float) -> set[str]:
    """Machines of which every process of the service that is on the list has fallen silent."""
    newest = select(DecoderRow.host, func.max(DecoderRow.heartbeat_at)).group_by(DecoderRow.host)
    longest_ago = database.clock(session) - timedelta(seconds=gone_seconds)
    return {host for host, heartbeat_at in session.execute(newest) if heartbeat_at < longest_ago}


def _is_gone(row: RunRow, silent_hosts: Set[str]) -> bool:
    if row.pid is None or row.host != socket.gethostname():
        return row.host in silent_hosts or datetime.now(UTC) - row.updated_at > _SILENCE
    try:
        os.kill(row.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _unknown(run_id: int) -> RunError:
    return RunError(f"Run {run_id} is unknown. `adaptive-spec runs` lists those that exist.")


def _record(row: RunRow) -> RunRecord:
    return RunRecord(
        id=row.id,
        trigger=row.trigger,
        state=row.state,
        created_at=row.created_at,
        finished_at=row.finished_at,
        progress=row.progress,
        error=row.error,
        release=row.release,
        report=row.report,
        settings=row.settings,
        pid=row.pid,
        cancel_reason=row.cancel_reason,
    )
