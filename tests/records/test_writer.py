import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from adaptive_spec.records.database import Database
from adaptive_spec.records.events import list_events
from adaptive_spec.records.tables import EvidenceRow, RequestRow, StepRow
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.records.writer import Writer
from adaptive_spec.settings import RecordSettings
from tests.records.rows import make_evidence, make_finish, make_step, make_trace

MakeWriter = Callable[..., Writer]


class Outage:
    """Makes every unit of work fail while ``on``."""

    def __init__(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on = True
        real = database.session_scope

        @contextmanager
        def session_scope(**arguments: Any) -> Iterator[Any]:
            if self.on:
                raise OperationalError("SELECT 1", {}, Exception("server is away"))
            with real(**arguments) as session:
                yield session

        monkeypatch.setattr(database, "session_scope", session_scope)


@pytest.fixture
def make_writer(tmp_path: Path) -> Iterator[MakeWriter]:
    writers: list[Writer] = []

    def make(database: Database, **settings: Any) -> Writer:
        given = {"url": "sqlite://", "folder": tmp_path / "traces", "flush_seconds": 0.02, **settings}
        writers.append(Writer(database, TraceStore(database, tmp_path / "traces", 0.2), RecordSettings(**given)))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close(0.2)


def count(database: Database, table: Any) -> int:
    with database.session_scope(read_only=True) as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def test_everything_reported_is_written(database: Database, make_writer: MakeWriter) -> None:
    writer = make_writer(database)
    for index in range(5):
        writer.on_step(make_step(step_index=index))
    writer.on_evidence(make_evidence())
    writer.on_finish(make_finish())
    writer.on_trace(make_trace())
    writer.event("swap", {"to": 2}, release=2)
    assert writer.flush(5)
    assert (writer.num_written, writer.num_dropped, writer.queue_depth) == (9, 0, 0)
    assert (count(database, StepRow), count(database, RequestRow), count(database, EvidenceRow)) == (5, 1, 1)
    assert sum(writer._traces.count()["code"]) == 1
    (event,) = list_events(database)
    assert (event.kind, event.detail, event.release) == ("swap", {"to": 2}, 2)


def test_a_full_queue_drops_and_counts_without_waiting(
    database: Database, make_writer: MakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(database, monkeypatch)
    writer = make_writer(database, queue_rows=10)
    begin = time.perf_counter()
    for index in range(500):
        writer.on_step(make_step(step_index=index))
        writer.on_evidence(make_evidence(step_index=index))
    assert time.perf_counter() - begin < 0.5
    assert (writer.num_dropped, writer.queue_depth) == (990, 10)
    assert not writer.flush(0.05)
    outage.on = False
    assert writer.flush(5)
    assert (writer.num_written, writer.num_dropped, writer.queue_depth) == (10, 990, 0)


def test_the_lag_is_that_of_the_oldest_row(
    database: Database, make_writer: MakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(database, monkeypatch)
    writer = make_writer(database)
    assert writer.lag_seconds == 0
    began = time.monotonic()
    writer.on_step(make_step())
    time.sleep(0.2)  # by now it is part of a batch
    writer.on_step(make_step(step_index=1))
    assert 0.2 <= writer.lag_seconds <= time.monotonic() - began
    outage.on = False
    assert writer.flush(5)
    while writer.lag_seconds and time.monotonic() < began + 60:
        time.sleep(0.01)
    assert writer.lag_seconds == 0


def test_an_outage_loses_nothing_that_fits(
    database: Database, make_writer: MakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(database, monkeypatch)
    writer = make_writer(database)
    writer.on_step(make_step())
    writer.on_trace(make_trace())
    time.sleep(0.15)
    assert writer.num_written == 0
    outage.on = False
    assert writer.flush(5)
    assert count(database, StepRow) == 1
    assert len(writer._traces.load()) == 1


def test_a_row_that_the_database_refuses_does_not_take_others_along(
    database: Database, make_writer: MakeWriter
) -> None:
    writer = make_writer(database, flush_seconds=0.2)
    writer.on_step(make_step("good", 0))
    writer.on_step(make_step("bad", chain_length=2**70))
    writer.on_step(make_step("good", 1))
    assert writer.flush(5)
    assert (writer.num_written, writer.num_dropped) == (2, 1)
    assert count(database, StepRow) == 2


def test_rows_written_twice_are_stored_once(database: Database, make_writer: MakeWriter) -> None:
    writer = make_writer(database)
    for _ in range(2):
        writer.on_step(make_step())
        writer.on_evidence(make_evidence())
        writer.on_finish(make_finish())
        assert writer.flush(5)
    assert (count(database, StepRow), count(database, RequestRow), count(database, EvidenceRow)) == (1, 1, 1)


def test_close_writes_what_is_queued_and_refuses_more(database: Database, make_writer: MakeWriter) -> None:
    writer = make_writer(database, flush_seconds=60)
    writer.on_step(make_step())
    writer.close()
    writer.on_step(make_step(step_index=1))
    assert (writer.num_written, writer.num_dropped) == (1, 1)
    assert not writer._thread.is_alive()


def test_close_gives_up_at_its_deadline(
    database: Database, make_writer: MakeWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    Outage(database, monkeypatch)
    writer = make_writer(database)
    writer.on_step(make_step())
    writer.close(0.1)
    assert (writer.num_written, writer.num_dropped, writer.queue_depth) == (0, 1, 0)
    assert not writer._thread.is_alive()


def test_recording_off_keeps_events_only(database: Database, make_writer: MakeWriter) -> None:
    writer = make_writer(database, enabled=False)
    writer.on_step(make_step())
    writer.on_evidence(make_evidence())
    writer.on_trace(make_trace())
    writer.event("start", {})
    assert writer.flush(5)
    assert (writer.num_written, count(database, StepRow), len(list_events(database))) == (1, 0, 1)


def test_several_threads_may_report(database: Database, make_writer: MakeWriter) -> None:
    writer = make_writer(database)
    threads = [
        threading.Thread(target=lambda name=name: [writer.on_step(make_step(name, i)) for i in range(50)] and None)
        for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.flush(5)
    assert count(database, StepRow) == 200
