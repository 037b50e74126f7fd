"""One holds the lock; it is free when that one lets go, dies, or loses its connection."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.records.database import Database
from adaptive_spec.records.leadership import LeaderLock, leader_lock
from adaptive_spec.records.runs import create_run, list_runs
from adaptive_spec.records.tables import StepRow
from tests.records.rows import insert, make_step

HOLDER = """
import sys, time
from adaptive_spec.records.database import Database
from adaptive_spec.records.leadership import leader_lock
lock = leader_lock(Database(sys.argv[1]))
print(lock.hold(), flush=True)
time.sleep(600)
"""


def url_of(database: Database) -> str:
    return database.url.render_as_string(hide_password=False)


def held_soon(lock: LeaderLock) -> bool:
    """Try for ten seconds: a server sees that a connection has ended only a moment later."""
    deadline = time.monotonic() + 10
    while not (held := lock.hold()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


@pytest.fixture
def other(database: Database) -> Iterator[LeaderLock]:
    """The lock of another process, as far as the database can tell."""
    elsewhere = Database(url_of(database))
    lock = leader_lock(elsewhere)
    yield lock
    lock.release()
    elsewhere.close()


def test_one_holds_until_it_lets_go(database: Database, other: LeaderLock) -> None:
    lock = leader_lock(database)
    assert lock.hold() and lock.hold()
    assert not other.hold()
    lock.release()
    lock.release()
    assert held_soon(other)
    assert not lock.hold()
    lock.release()


def test_the_lock_dies_with_its_process(database: Database) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, url_of(database)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "True\n"
    lock = leader_lock(database)
    assert not lock.hold()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert held_soon(lock)
    lock.release()


def test_who_loses_the_connection_is_told_and_may_try_again(migrated: str) -> None:
    database = Database(migrated)
    lock = leader_lock(database)
    assert lock.hold()
    with database.session_scope() as session:
        held = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = "
        session.execute(text(f"{held} (SELECT oid FROM pg_database WHERE datname = current_database())"))
    with pytest.raises(SQLAlchemyError):
        lock.hold()
    assert lock.hold()
    lock.release()
    database.close()


def test_a_database_in_memory_is_led_by_its_process() -> None:
    database = Database("sqlite:///:memory:")
    assert leader_lock(database).hold()
    database.close()


def test_whoever_leads_is_in_nobodys_way(database: Database, other: LeaderLock) -> None:
    assert other.hold()
    with database.session_scope() as session:
        if not database.is_sqlite:
            session.execute(text("SET LOCAL lock_timeout = '1s'"))
        insert(database, session, make_step())
    assert database.settled_id(StepRow) == 1
    run_id = create_run(database, "person", {})
    assert list_runs(database)[0].id == run_id
