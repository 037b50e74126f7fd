"""Who listens hears what was committed, also after a lost connection."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from adaptive_spec.records.database import Database
from adaptive_spec.records.notify import Listener, notify
from adaptive_spec.records.releases import set_live
from adaptive_spec.records.runs import request_run

BUSY_LISTENERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
)


class Ear:
    """Counts what is heard, and waits for more."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = threading.Condition()

    def __call__(self) -> None:
        with self._changed:
            self.count += 1
            self._changed.notify_all()

    def hears(self, count: int, seconds: float = 10.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.count >= count, seconds)


@pytest.fixture
def served(postgresql: object) -> Iterator[Database]:
    assert callable(postgresql)
    database = Database(postgresql())
    database.upgrade()
    yield database
    database.close()


def test_releases_and_requested_runs_are_heard_once_they_are_committed(served: Database) -> None:
    ear = Ear()
    listener = Listener(served, ear)
    listener.start()
    assert ear.hears(1)  # that it listens now
    with pytest.raises(KeyError), served.session_scope() as session:
        notify(session)
        raise KeyError
    set_live(served, 0, "test")
    assert ear.hears(2)
    request_run(served, "person")
    assert ear.hears(3)
    assert ear.count == 3
    listener.stop()


def test_a_listener_comes_back(served: Database) -> None:
    ear = Ear()
    listener = Listener(served, ear)
    listener.start()
    assert ear.hears(1)
    with served.session_scope() as session:
        assert session.execute(text(BUSY_LISTENERS)).all() == [(True,)]
    assert ear.hears(2)  # connected again: something may have been missed
    set_live(served, 0, "test")
    assert ear.hears(3)
    listener.stop()


def test_sqlite_notifies_nobody(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'r.db'}")
    database.upgrade()
    ear = Ear()
    listener = Listener(database, ear)
    listener.start()
    set_live(database, 0, "test")
    listener.stop()
    assert ear.count == 0
    database.close()
