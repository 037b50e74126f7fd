"""What goes by age, by size and on demand, and that it is gone from the files too."""

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
from sqlalchemy import func, select

from adaptive_spec.core import Trace
from adaptive_spec.records import retention, traces
from adaptive_spec.records.database import Database
from adaptive_spec.records.retention import Retention, fair_share, forget_request, surplus
from adaptive_spec.records.tables import EvidenceRow, StepRow, TraceRow
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.records.writer import Writer
from adaptive_spec.settings import RecordSettings
from tests.records.rows import START, drop_counts, make_evidence, make_step, make_trace, record
from tests.records.test_quota import HELD_OUT, TRAIN


@pytest.fixture
def store(database: Database, tmp_path: Path) -> TraceStore:
    return TraceStore(database, tmp_path / "traces", 0.2)


def limits(store: TraceStore, **given: Any) -> RecordSettings:
    return RecordSettings(**{"url": "sqlite://", "folder": store.folder, "trace_days": 0, "trace_bytes": 0, **given})


def names(store: TraceStore) -> list[str]:
    return [trace.request_id for trace in store.load()]


def disk_bytes(store: TraceStore) -> int:
    return sum(path.stat().st_size for path in store.folder.iterdir())


def stored_bytes(store: TraceStore) -> bytes:
    return b"".join(path.read_bytes() for path in store.folder.iterdir())


def bytes_of(trace: Trace) -> bytes:
    return numpy.asarray(trace.tokens, dtype=numpy.int32).tobytes()


def test_old_traces_go_from_rows_and_files(store: TraceStore) -> None:
    old = make_trace(0)
    store.add([old, make_trace(1, at=START + timedelta(days=9))])
    store.add([make_trace(2, at=START + timedelta(days=20))])
    keeping = Retention(store, limits(store, trace_days=10))
    keeping.sweep(START + timedelta(days=9))
    assert names(store) == ["request-0", "request-1", "request-2"]
    assert bytes_of(old) in stored_bytes(store)
    keeping.sweep(START + timedelta(days=11))
    assert names(store) == ["request-1", "request-2"]
    assert bytes_of(old) not in stored_bytes(store)
    assert drop_counts(store.database) == {("code", "age"): 1}


def test_the_size_limit_takes_the_oldest_of_those_who_take_most(store: TraceStore) -> None:
    store.add([make_trace(seed, domain="quiet", prompt=TRAIN) for seed in range(3)])
    for start in range(10, 50, 10):
        store.add([make_trace(seed, prompt=TRAIN) for seed in range(start, start + 10)])
    limit = disk_bytes(store) // 2
    Retention(store, limits(store, trace_bytes=limit)).sweep()
    kept = names(store)
    assert kept[:3] == ["request-0", "request-1", "request-2"]  # nobody displaces who takes little
    assert kept[3:] == [f"request-{seed}" for seed in range(50 - len(kept[3:]), 50)]
    assert 0.85 * limit < disk_bytes(store) <= limit
    assert drop_counts(store.database) == {("code", "size"): 40 - len(kept[3:])}


def test_held_out_traces_are_the_last_to_go_for_size(store: TraceStore) -> None:
    store.add([make_trace(seed, prompt=HELD_OUT) for seed in range(5)])
    store.add([make_trace(seed, prompt=TRAIN) for seed in range(5, 25)])
    Retention(store, limits(store, trace_bytes=disk_bytes(store) // 2, min_held_out_traces=3)).sweep()
    kept = names(store)
    assert kept[:3] == ["request-2", "request-3", "request-4"]
    assert len(kept) > 3 and kept[-1] == "request-24"
    Retention(store, limits(store, trace_bytes=disk_bytes(store) // 6, min_held_out_traces=3)).sweep()
    assert names(store) in (["request-4"], ["request-3", "request-4"])  # the limit holds all the same


def test_fair_shares() -> None:
    assert fair_share({"a": 10, "b": 100, "c": 100}, 110) == 50
    assert fair_share({"a": 10, "b": 20}, 100) == 100
    assert fair_share({"a": 100, "b": 100, "c": 100}, 30) == 10
    assert surplus([], 5, 0) == []


def test_files_that_hold_little_are_written_anew(store: TraceStore) -> None:
    store.add([make_trace(seed) for seed in range(10)])
    with store.database.session_scope() as session:
        for row in session.scalars(select(TraceRow).where(TraceRow.id <= 5)):
            session.delete(row)
    whole, loaded = disk_bytes(store), store.load()
    Retention(store, limits(store)).sweep()
    assert disk_bytes(store) < 0.6 * whole
    assert names(store) == [trace.request_id for trace in loaded]
    once = sorted(path.name for path in store.folder.iterdir())
    Retention(store, limits(store)).sweep()
    assert sorted(path.name for path in store.folder.iterdir()) == once


def test_many_small_files_become_one(store: TraceStore) -> None:
    for seed in range(20):
        store.add([make_trace(seed)])
    Retention(store, limits(store)).sweep()
    assert len(list(store.folder.iterdir())) == 1
    assert names(store) == [f"request-{seed}" for seed in range(20)]


def test_traces_from_before_they_were_weighed_are_weighed(store: TraceStore) -> None:
    store.add([make_trace(0)])
    with store.database.session_scope() as session:
        row = session.scalars(select(TraceRow)).one()
        weight, tail = row.num_bytes, row.tail_mass
        row.num_bytes = row.tail_mass = None
    Retention(store, limits(store)).sweep()
    with store.database.session_scope(read_only=True) as session:
        row = session.scalars(select(TraceRow)).one()
        assert (row.num_bytes, row.tail_mass) == (weight, tail)


def test_a_sweep_is_bounded_and_the_next_goes_on(store: TraceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(0, 8, 2):
        store.add([make_trace(seed), make_trace(seed + 1, at=START + timedelta(days=99))])
    monkeypatch.setattr(retention, "_SWEEP_BYTES", 1)
    keeping = Retention(store, limits(store, trace_days=10))
    for left in (7, 6, 5, 4, 4):
        keeping.sweep(START + timedelta(days=50))
        assert len(names(store)) == left
    assert names(store) == [f"request-{seed}" for seed in (1, 3, 5, 7)]
    Retention(store, limits(store, trace_days=10), stopped=lambda: True).sweep(START + timedelta(days=500))
    assert len(names(store)) == 4


def test_a_shard_that_cannot_be_rewritten_holds_up_no_other(
    store: TraceStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(3):
        store.add([make_trace(seed)])
    bad, real = sorted(path.name for path in store.folder.iterdir())[1], store.rewrite

    def rewrite(shards: Any, *arguments: Any) -> int:
        if bad in shards:
            raise OSError("input/output error")
        return real(shards, *arguments)

    monkeypatch.setattr(store, "rewrite", rewrite)
    Retention(store, limits(store, trace_days=1)).sweep(START + timedelta(days=2))
    assert names(store) == ["request-1"]
    assert bad in caplog.text


def test_a_request_is_forgotten_with_its_choices(store: TraceStore) -> None:
    ids = ["cmpl-1", "cmpl-1-0", "cmpl-1-12", "cmpl-1-0-x", "cmpl-10", "cmpl_1", "cmplX1"]
    made = [make_trace(seed, request_id=name) for seed, name in enumerate(ids)]
    for pair in (made[:2], made[2:5], made[5:]):
        store.add(pair)
    for name in ids:
        record(store.database, make_evidence(name), make_step(name))
    found = forget_request(store, "cmpl-1")
    assert (found.num_traces, found.num_evidence) == (3, 3)
    assert names(store) == ids[3:]
    for trace, gone in zip(made, [True] * 3 + [False] * 4, strict=True):
        assert (bytes_of(trace) not in stored_bytes(store)) == gone
    with store.database.session_scope(read_only=True) as session:
        assert sorted(session.scalars(select(EvidenceRow.request_id))) == sorted(ids[3:])
        assert session.scalar(select(func.count()).select_from(StepRow)) == 7  # statistics stay
    assert drop_counts(store.database) == {("code", "deleted"): 3}
    assert forget_request(store, "cmpl-1").num_traces == 0
    assert forget_request(store, "cmpl%").num_traces == 0


def test_on_sqlite_nothing_of_the_evidence_is_left_in_the_file(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'records.db'}")
    database.upgrade()
    chain = tuple(range(70_000, 70_008))
    record(database, make_evidence("gone", chain=chain, strict=(True,) * 8, similarities=(0.5,) * 8))
    record(database, make_evidence("stays"))

    def on_disk() -> bytes:
        return b"".join(path.read_bytes() for path in tmp_path.glob("records.db*"))

    trail = numpy.asarray(chain, dtype="<i4").tobytes()
    assert trail in on_disk()
    assert forget_request(TraceStore(database, tmp_path / "traces", 0.2), "gone").num_evidence == 1
    assert trail not in on_disk()
    database.close()


def test_forgetting_while_a_sweep_moves_everything(store: TraceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rewrites at once: what is forgotten is gone, and nothing else is."""
    for seed in range(20):
        store.add([make_trace(seed)])
    errors: list[BaseException] = []

    def sweep() -> None:
        other = Database(store.database.url.render_as_string(hide_password=False))
        try:
            Retention(TraceStore(other, store.folder, 0.2), limits(store)).sweep()
        except BaseException as error:
            errors.append(error)
        finally:
            other.close()

    thread = threading.Thread(target=sweep)
    thread.start()
    for seed in range(0, 20, 4):
        assert forget_request(store, f"request-{seed}").num_traces == 1
    thread.join()
    assert errors == []
    assert names(store) == [f"request-{seed}" for seed in range(20) if seed % 4]
    for seed in range(0, 20, 4):
        assert bytes_of(make_trace(seed)) not in stored_bytes(store)


def test_the_writer_sweeps(store: TraceStore) -> None:
    store.add([make_trace(seed, at=START) for seed in range(3)])
    writer = Writer(store.database, store, limits(store, trace_days=30, flush_seconds=0.02, sweep_seconds=0.05))
    deadline = time.monotonic() + 10
    while names(store) and time.monotonic() < deadline:
        time.sleep(0.02)
    writer.close()
    assert names(store) == [] and list(store.folder.iterdir()) == []


def test_nobody_waits_for_a_sweep(store: TraceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def linger(self: Retention) -> None:
        begun.set()
        assert may_end.wait(30)

    monkeypatch.setattr(Retention, "sweep", linger)
    writer = Writer(store.database, store, limits(store, flush_seconds=0.02, sweep_seconds=0.02))
    assert begun.wait(10)
    start = time.perf_counter()
    for seed in range(200):
        writer.on_trace(make_trace(seed))
        writer.on_step(make_step(step_index=seed))
    assert time.perf_counter() - start < 1
    assert writer.queue_depth == 400 and names(store) == []
    may_end.set()
    assert writer.flush(10)
    writer.close()
    assert len(names(store)) == 200 and writer.num_dropped == 0


def test_a_sweep_that_fails_costs_no_records(store: TraceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Retention) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Retention, "sweep", fail)
    monkeypatch.setattr(Retention, "recover", fail)
    writer = Writer(store.database, store, limits(store, flush_seconds=0.02, sweep_seconds=0.02))
    time.sleep(0.1)
    writer.on_trace(make_trace())
    assert writer.flush(5)
    writer.close()
    assert names(store) == ["request-0"]


def _die(*arguments: Any, **named: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at(moment: str) -> None:
    if moment == "half a file":
        Path.rename = _die  # type: ignore[method-assign,assignment]
    elif moment == "between file and rows":
        traces.count_drops = _die  # type: ignore[assignment]
    else:
        Path.unlink = _die  # type: ignore[method-assign,assignment]


def _add_and_die(url: str, folder: Path, moment: str) -> None:
    """Add a trace, and be killed at a moment of it."""
    store = TraceStore(Database(url), folder, 0.2)
    _die_at(moment)
    store.add([make_trace(99)])


def _rewrite_and_die(url: str, folder: Path, moment: str) -> None:
    """Rewrite the only shard without its first trace, and be killed at a moment of it."""
    store = TraceStore(Database(url), folder, 0.2)
    (shard,) = (path.name for path in folder.iterdir())
    _die_at(moment)
    with store.database.session_scope(read_only=True) as session:
        first = session.scalar(select(func.min(TraceRow.id)))
    store.rewrite([shard], [first or 0], "deleted")


def _killed(store: TraceStore, work: Any, moment: str) -> None:
    url = store.database.url.render_as_string(hide_password=False)
    child = multiprocessing.get_context("spawn").Process(target=work, args=(url, store.folder, moment))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("moment", ["half a file", "between file and rows"])
def test_killed_while_adding(store: TraceStore, moment: str) -> None:
    store.add([make_trace(0)])
    _killed(store, _add_and_die, moment)
    assert names(store) == ["request-0"]
    (left,) = [path for path in store.folder.iterdir() if bytes_of(make_trace(99)) in path.read_bytes()]
    os.utime(left, (0, 0))
    Retention(store, limits(store)).recover()
    assert not left.exists()
    assert names(store) == ["request-0"]
    assert store.add([make_trace(99)]) == 1


@pytest.mark.parametrize("moment", ["half a file", "between file and rows", "between rows and the old file"])
def test_killed_while_rewriting(store: TraceStore, moment: str) -> None:
    store.add([make_trace(seed) for seed in range(3)])
    _killed(store, _rewrite_and_die, moment)
    done = moment == "between rows and the old file"
    assert names(store) == [f"request-{seed}" for seed in range(1 if done else 0, 3)]
    assert len(list(store.folder.iterdir())) == 2
    for path in store.folder.iterdir():
        os.utime(path, (0, 0))
    Retention(store, limits(store)).recover()
    assert len(list(store.folder.iterdir())) == 1
    assert (bytes_of(make_trace(0)) in stored_bytes(store)) == (not done)
    assert names(store) == [f"request-{seed}" for seed in range(1 if done else 0, 3)]
