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
from sqlalchemy.exc import OperationalError

from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore, is_degenerate, is_held_out
from tests.records.rows import make_trace


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


def test_duplicates_and_loops_are_passed_over(store: TraceStore) -> None:
    assert store.add([make_trace(0), make_trace(0)]) == 1
    assert store.add([make_trace(0), make_trace(1, completion=(7, 8) * 10)]) == 0
    assert len(store.load()) == 1
    assert len(list(store.folder.iterdir())) == 1


def test_degenerate_completions() -> None:
    assert is_degenerate([1, 2] * 8)
    assert is_degenerate(list(range(100)) + [5, 6, 7] * 30)
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


def test_orphans_are_discarded_once_old_enough(store: TraceStore) -> None:
    store.add([make_trace()])
    for name in ("half.safetensors.unfinished", "orphan.safetensors"):
        (store.folder / name).write_bytes(b"half")
    (store.folder / "notes.txt").write_text("not ours")
    assert store.discard_orphans() == 0
    assert store.discard_orphans(min_age_seconds=0) == 2
    assert len(store.load()) == 1
    assert len(list(store.folder.iterdir())) == 2


def test_a_damaged_or_missing_shard_is_passed_over(store: TraceStore, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(3):
        store.add([make_trace(seed)])
    first, second, _ = sorted(store.folder.iterdir())
    first.write_bytes(first.read_bytes()[:-8])
    second.unlink()
    assert [trace.request_id for trace in store.load()] == ["request-2"]
    assert first.name in caplog.text and second.name in caplog.text


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
