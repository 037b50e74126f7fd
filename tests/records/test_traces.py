import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from adaptive_spec.records.database import Database
from adaptive_spec.records.screening import is_degenerate, is_held_out
from adaptive_spec.records.tables import TraceRow
from adaptive_spec.records.traces import TraceStore
from tests.records.rows import drop_counts, make_trace


@pytest.fixture
def store(database: Database, tmp_path: Path) -> TraceStore:
    return TraceStore(database, tmp_path / "traces", 0.5)


def test_traces_come_back_as_they_were(store: TraceStore) -> None:
    traces = [make_trace(seed) for seed in range(3)]
    assert store.add(traces) == 3
    assert len(list(store.folder.iterdir())) == 1
    for given_trace, loaded in zip(traces, store.load(), strict=True):
        for name in ("request_id", "domain", "tokens", "prompt_tokens", "release", "at"):
            assert getattr(loaded, name) == getattr(given_trace, name)
        for name in ("top_ids", "top_log_probs", "tail_mass"):
            numpy.testing.assert_array_equal(getattr(loaded, name), getattr(given_trace, name))


def test_split_domains_and_limit(store: TraceStore) -> None:
    store.add([make_trace(seed, domain="code") for seed in range(8)])
    store.add([make_trace(seed, domain="law") for seed in range(8, 16)])
    train, held_out = store.load(held_out=False), store.load(held_out=True)
    assert len(train) + len(held_out) == 16
    assert train and held_out
    assert not {trace.request_id for trace in train} & {trace.request_id for trace in held_out}
    counts = store.count()
    assert {domain: sum(pair) for domain, pair in counts.items()} == {"code": 8, "law": 8}
    assert sum(pair[1] for pair in counts.values()) == len(held_out)
    newest = store.load(limit_per_domain=2)
    assert [trace.request_id for trace in newest] == ["request-6", "request-7", "request-14", "request-15"]
    assert [trace.domain for trace in store.load(domains=["law"], limit_per_domain=1)] == ["law"]


def test_duplicates_and_loops_are_dropped_and_counted(store: TraceStore) -> None:
    again = make_trace(0, request_id="another")
    assert store.add([make_trace(0), again]) == 1
    assert store.add([again, make_trace(1, completion=(7, 8) * 10), make_trace(2, completion=(7,) * 16)]) == 0
    assert store.add([make_trace(3, domain="law", completion=(5,) * 20)]) == 0
    assert len(store.load()) == 1
    assert len(list(store.folder.iterdir())) == 1
    assert drop_counts(store.database) == {("code", "duplicate"): 2, ("code", "loop"): 2, ("law", "loop"): 1}


def test_the_same_trace_again_is_a_retry_and_no_duplicate(store: TraceStore) -> None:
    assert store.add([make_trace(0)]) == 1
    assert store.add([make_trace(0)]) == 0
    assert drop_counts(store.database) == {}


def test_degenerate_completions() -> None:
    assert is_degenerate([1, 2] * 8)
    assert is_degenerate(list(range(100)) + [5, 6, 7] * 30)
    assert is_degenerate(list(range(100)) + list(range(30)) * 4)  # many tokens, but a cycle
    assert is_degenerate((*range(48), *([9] * 16)))  # the last 16 alone
    assert not is_degenerate(list(range(100)) + list(range(30)) * 3)
    assert not is_degenerate((*range(49), *([99] * 15)))
    assert not is_degenerate([1, 1, 1])
    assert not is_degenerate(list(range(40)) * 2)


@given(st.lists(st.integers(0, 50_000), min_size=1), st.lists(st.integers(0, 50_000)))
def test_only_the_prompt_decides_the_split(prompt: list[int], completion: list[int]) -> None:
    decision = is_held_out(prompt, len(prompt), 0.2)
    assert is_held_out(tuple(prompt + completion), len(prompt), 0.2) == decision
    assert not decision or is_held_out(prompt, len(prompt), 0.4)  # a larger share only adds


def test_held_out_share_is_met_and_stable() -> None:
    share = sum(is_held_out([number], 1, 0.2) for number in range(2000)) / 2000
    assert share == pytest.approx(0.2, abs=0.03)
    assert [number for number in range(12) if is_held_out([number], 1, 0.2)] == [3, 6, 11]


def test_nothing_is_left_when_the_database_refuses(store: TraceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real = store.database.session_scope

    @contextmanager
    def session_scope(*, read_only: bool = False) -> Any:
        if not read_only:
            raise OperationalError("INSERT", {}, Exception("away"))
        with real(read_only=True) as session:
            yield session

    monkeypatch.setattr(store.database, "session_scope", session_scope)
    with pytest.raises(OperationalError):
        store.add([make_trace()])
    assert list(store.folder.iterdir()) == []
    monkeypatch.undo()
    assert drop_counts(store.database) == {}


def test_orphans_are_discarded_once_old_enough(store: TraceStore) -> None:
    store.add([make_trace()])
    for name in ("half.safetensors.unfinished", "orphan.safetensors"):
        (store.folder / name).write_bytes(b"half")
    (store.folder / "notes.txt").write_text("not ours")
    assert store.discard_orphans() == 0
    assert store.discard_orphans(min_age_seconds=0) == 2
    assert len(store.load()) == 1
    assert len(list(store.folder.iterdir())) == 2


def test_a_clock_that_is_ahead_discards_nothing_young(store: TraceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (store.folder / "another's.safetensors.unfinished").write_bytes(b"half")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 86_400)
    assert store.discard_orphans() == 0
    os.utime(store.folder / "another's.safetensors.unfinished", (0, now() - 601))
    monkeypatch.setattr(time, "time", lambda: now() - 86_400)
    assert store.discard_orphans() == 1


def test_a_damaged_or_missing_shard_is_passed_over(store: TraceStore, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(3):
        store.add([make_trace(seed)])
    first, second, _ = sorted(store.folder.iterdir())
    first.write_bytes(first.read_bytes()[:-8])
    second.unlink()
    assert [trace.request_id for trace in store.load()] == ["request-2"]
    assert first.name in caplog.text and second.name in caplog.text


def test_rows_of_damaged_and_missing_shards_are_discarded_at_start(store: TraceStore) -> None:
    for seed in range(4):
        store.add([make_trace(seed)])
    truncated, missing, empty, _ = sorted(store.folder.iterdir())
    truncated.write_bytes(truncated.read_bytes()[:-8])
    missing.unlink()
    empty.write_bytes(b"")
    assert store.discard_damaged() == 3
    assert [trace.request_id for trace in store.load()] == ["request-3"]
    assert len(list(store.folder.iterdir())) == 1
    assert drop_counts(store.database) == {("code", "damaged"): 3}
    assert store.discard_damaged() == 0


def test_a_folder_without_any_shard_is_taken_for_the_wrong_one(
    store: TraceStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.add([make_trace()])
    assert TraceStore(store.database, tmp_path / "unmounted", 0.5).discard_damaged() == 0
    assert "records.folder" in caplog.text
    assert len(store.load()) == 1


def test_shards_are_rewritten_without_what_goes(store: TraceStore) -> None:
    for seed in range(0, 6, 2):
        store.add([make_trace(seed), make_trace(seed + 1)])
    before = {trace.request_id: trace for trace in store.load()}
    shards = sorted(path.name for path in store.folder.iterdir())
    with store.database.session_scope(read_only=True) as session:
        ids = dict(session.execute(select(TraceRow.request_id, TraceRow.id)).all())
    written = store.rewrite(shards[:2], [ids["request-1"], ids["request-4"]], "age")  # the latter is elsewhere
    after = store.load()
    assert [trace.request_id for trace in after] == [f"request-{seed}" for seed in (0, 2, 3, 4, 5)]
    for trace in after:
        assert trace.tokens == before[trace.request_id].tokens
        numpy.testing.assert_array_equal(trace.top_log_probs, before[trace.request_id].top_log_probs)
    (made,) = {path.name for path in store.folder.iterdir()} - set(shards)
    assert {path.name for path in store.folder.iterdir()} == {made, shards[2]}
    size = (store.folder / made).stat().st_size
    assert size <= written < size + 3
    assert drop_counts(store.database) == {("code", "age"): 1}


def test_a_rewrite_that_the_database_refuses_changes_nothing(
    store: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add([make_trace(0), make_trace(1)])
    (shard,) = store.folder.iterdir()

    def refuse(*arguments: Any) -> None:
        raise OperationalError("INSERT", {}, Exception("away"))

    with monkeypatch.context() as patched:
        patched.setattr("adaptive_spec.records.traces.count_drops", refuse)
        with pytest.raises(OperationalError):
            store.rewrite([shard.name], [1])
    assert shard.exists() and len(store.load()) == 2
    assert store.discard_orphans(min_age_seconds=0) == 1  # the copy
    assert len(store.load()) == 2


def test_traces_that_move_while_they_are_loaded_are_found(store: TraceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([make_trace(0), make_trace(1)])
    (shard,) = store.folder.iterdir()
    real = store._read

    def move_first(rows: Any) -> Any:
        store.rewrite([shard.name])
        return real(rows)

    monkeypatch.setattr(store, "_read", move_first)
    assert [trace.request_id for trace in store.load()] == ["request-0", "request-1"]


def _add_forever(url: str, folder: Path) -> None:
    store = TraceStore(Database(url), folder, 0.5)
    for seed in range(100_000):
        store.add([make_trace(seed)])


def test_killed_in_the_middle_every_counted_trace_is_whole(store: TraceStore) -> None:
    url = store.database.url.render_as_string(hide_password=False)
    child = multiprocessing.get_context("spawn").Process(target=_add_forever, args=(url, store.folder))
    child.start()
    deadline = time.monotonic() + 30
    while not store.count() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert len(store.load()) == sum(store.count()["code"]) > 0
    store.discard_orphans(min_age_seconds=0)
    assert len(list(store.folder.iterdir())) == len(store.load())
    assert store.add([make_trace(1_000_000)]) == 1
