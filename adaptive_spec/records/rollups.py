"""Rollups: what steps and requests showed, added up per minute, hour and day, so that raw rows may go.

Called by the service every ``schedule.rollup_seconds`` and by ``adaptive-spec db prune``.  Steps are taken in the order
of their ids, at most so many in a transaction; the id up to which they are rolled up moves in the same transaction, so
a crash repeats nothing and loses nothing, and a row that comes late, however old its time, has a new id and is added
where it belongs.  Requests are marked one by one.

Every row is in a minute, an hour and a day at once: deleting the finer ones later loses no sum.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from itertools import product
from typing import Any

from sqlalchemy import ColumnElement, Row, case, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from adaptive_spec.records.database import Database
from adaptive_spec.records.spans import SPANS, Rollup, begun, floor, parsed
from adaptive_spec.records.tables import RequestCountRow, RequestRollupRow, RequestRow, RollupStateRow, StepRollupRow
from adaptive_spec.records.tables import StepRow as Steps

ANY_RELEASE, ANY = -1, "*"  # left open in a kind of step; ANY_RELEASE also: served by several

_BATCH_STEPS = 10_000  # of one transaction, which holds the write lock on SQLite for so long
_BATCH_REQUESTS = 2_000
_BATCH_ROWS = 2_000  # of one statement
_SLICE = ("domain", "release", "drafter", "verifier", "policy")
_OUTCOME = ("num_reached", "num_reached_accepted")

STEP_SUMS: Mapping[str, ColumnElement[Any]] = {
    "num_steps": func.count(),
    "num_spec_steps": func.sum(case((Steps.chain_length > 0, 1), else_=0)),
    "num_draft_tokens": func.sum(Steps.chain_length),
    "num_accepted_draft_tokens": func.sum(Steps.num_accepted),
    "num_emitted_tokens": func.sum(Steps.num_emitted),
    "num_divergent_tokens": func.sum(Steps.num_divergent),
    "overlap_sum": func.sum(Steps.overlap_sum),
    "total_variation": func.sum(Steps.total_variation),
    "given_up_nats": func.sum(Steps.given_up_nats),
}


def roll_up(database: Database, stopped: Callable[[], bool] = lambda: False) -> int:
    """Roll up what is recorded by now, and return how many steps that were.

    Safe to call from several processes at once: they take turns by transaction.

    Args:
        stopped: whether to leave the rest to the next call.

    Raises:
        SQLAlchemyError: the database does not answer.
    """
    newest, last, total = database.settled_id(Steps), _last_step(database), 0
    while last < newest and not stopped():
        last, num_steps = _roll_up_steps(database, newest)
        total += num_steps
    while not stopped() and _roll_up_requests(database):
        pass
    return total


def kinds(release: int, drafter: str, verifier: str) -> Iterable[tuple[int, str, str]]:
    """The kinds of step as which a step counts: its own, and those that leave something open."""
    return product((release, ANY_RELEASE), (drafter, ANY), (verifier, ANY))


def _last_step(database: Database) -> int:
    with database.session_scope(read_only=True) as session:
        state = session.get(RollupStateRow, 1)
        return state.last_step if state else 0


def locked_state(database: Database, session: Session) -> RollupStateRow:
    """The state, locked until the transaction ends."""
    if session.get(RollupStateRow, 1) is None:
        insert = (sqlite.insert if database.is_sqlite else postgresql.insert)(RollupStateRow)
        session.execute(insert.on_conflict_do_nothing(), {"id": 1, "last_step": 0})
    return session.get_one(RollupStateRow, 1, with_for_update=True, populate_existing=True)


def _roll_up_steps(database: Database, newest: int) -> tuple[int, int]:
    """Roll up the next steps with ids up to ``newest``; return up to which id that was, and how many."""
    with database.session_scope() as session:
        state = locked_state(database, session)
        ids = select(Steps.id).where(Steps.id > state.last_step, Steps.id <= newest).order_by(Steps.id)
        last = session.scalar(select(func.max(ids.limit(_BATCH_STEPS).subquery().c.id)))
        if last is None:  # another process was faster, or the ids are of rows that never came
            state.last_step = max(newest, state.last_step)
            return state.last_step, 0
        sums = _step_sums(database, session, (Steps.id > state.last_step, Steps.id <= last))
        _add(database, session, StepRollupRow, sums)
        _add(database, session, RequestCountRow, _request_moves(session, state.last_step, last))
        state.last_step = last
        return last, sum(int(row["num_steps"]) for row in sums if row["span"] == "day")


def _step_sums(database: Database, session: Session, batch: Iterable[ColumnElement[bool]]) -> list[dict[str, Any]]:
    minute = begun(Steps.at, "minute", is_sqlite=database.is_sqlite)
    key = [getattr(Steps, name) for name in (*_SLICE, *_OUTCOME)]
    columns = [value.label(name) for name, value in STEP_SUMS.items()]
    query = select(minute.label("minute"), *key, *columns).where(*batch).group_by(minute, *key)
    return _by_span(session.execute(query), (*_SLICE, *_OUTCOME), tuple(STEP_SUMS))


def _by_span(rows: Iterable[Row[Any]], key: tuple[str, ...], sums: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of minutes as rows of every span."""
    found: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        minute = parsed(row.minute, "minute")
        kind, values = tuple(getattr(row, name) for name in key), [getattr(row, name) for name in sums]
        for span in SPANS:
            place = (span, floor(minute, span), *kind)
            before = found.get(place)
            found[place] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]
    names = ("span", "start", *key, *sums)
    return [dict(zip(names, (*place, *values), strict=True)) for place, values in found.items()]


def _request_moves(session: Session, before: int, last: int) -> list[dict[str, Any]]:
    """What the steps of ids in (before, last] change in where requests have their last step of each kind."""
    key = (Steps.request_id, *(getattr(Steps, name) for name in _SLICE))
    touched = select(Steps.request_id).where(Steps.id > before, Steps.id <= last)
    query = (
        select(
            *key, func.max(case((Steps.id <= before, Steps.at))).label("earlier"), func.max(Steps.at).label("latest")
        )
        .where(Steps.request_id.in_(touched), Steps.id <= last)
        .group_by(*key)
    )
    earlier: dict[tuple[Any, ...], datetime] = {}
    latest: dict[tuple[Any, ...], datetime] = {}
    for row in session.execute(query):
        for release, drafter, verifier in kinds(row.release, row.drafter, row.verifier):
            kind = (row.request_id, row.domain, release, drafter, verifier, row.policy)
            latest[kind] = max(row.latest, latest.get(kind, row.latest))
            if row.earlier is not None:
                earlier[kind] = max(row.earlier, earlier.get(kind, row.earlier))
    moves: Counter[tuple[Any, ...]] = Counter()
    for kind, at in latest.items():
        for span in SPANS:
            moves[span, floor(at, span), *kind[1:]] += 1
            if kind in earlier:
                moves[span, floor(earlier[kind], span), *kind[1:]] -= 1
    names = ("span", "start", "domain", "release", "drafter", "verifier", "policy", "num_requests")
    return [dict(zip(names, (*place, number), strict=True)) for place, number in moves.items() if number]


def _roll_up_requests(database: Database) -> int:
    """Roll up the next finished requests, and return how many."""
    names = ("domain", "first_release", "last_release", "policy", "finished_at", "completion_tokens", "decode_seconds")
    columns = (RequestRow.request_id, *(getattr(RequestRow, name) for name in names))
    with database.session_scope() as session:
        locked_state(database, session)
        query = select(*columns).where(~RequestRow.rolled_up).limit(_BATCH_REQUESTS)
        rows = session.execute(query).all()
        if rows:
            _add(database, session, RequestRollupRow, _request_sums(rows))
            done = RequestRow.request_id.in_([row.request_id for row in rows])
            session.execute(update(RequestRow).where(done).values(rolled_up=True))
        return len(rows)


def _request_sums(rows: Iterable[Row[Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for row in rows:
        release = row.first_release if row.first_release == row.last_release else ANY_RELEASE
        for span in SPANS:
            sums = found[span, floor(row.finished_at, span), row.domain, release, row.policy]
            sums[0] += 1
            if row.decode_seconds > 0:
                sums[1] += row.completion_tokens
                sums[2] += row.decode_seconds
    names = ("span", "start", "domain", "release", "policy", "num_requests", "timed_tokens", "decode_seconds")
    return [dict(zip(names, (*place, *sums), strict=True)) for place, sums in found.items()]


def _add(database: Database, session: Session, table: Rollup, rows: list[dict[str, Any]]) -> None:
    """Add the values of rows to those that have their keys already."""
    insert = (sqlite.insert if database.is_sqlite else postgresql.insert)(table)
    key = [column.name for column in table.__table__.primary_key]
    sums = {
        column.name: getattr(table, column.name) + insert.excluded[column.name]
        for column in table.__table__.columns
        if column.name not in key
    }
    statement = insert.on_conflict_do_update(index_elements=key, set_=sums)
    for begin in range(0, len(rows), _BATCH_ROWS):
        session.connection().execute(statement, rows[begin : begin + _BATCH_ROWS])
