"""Who stays when a domain has more traces than its quota."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chisquare
from sqlalchemy import select

from adaptive_spec.records.database import Database
from adaptive_spec.records.quota import Quota, enforce
from adaptive_spec.records.screening import digest_of, is_held_out
from adaptive_spec.records.tables import TraceRow
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import RecordSettings
from tests.records.rows import START, drop_counts, make_trace

TRAIN, HELD_OUT = (  # prompts that fall on either side at a share of 0.2
    next((number,) * 3 for number in range(100) if is_held_out((number,) * 3, 3, 0.2) == side) for side in (False, True)
)


def store_of(database: Database, folder: Path, quota: Quota) -> TraceStore:
    return TraceStore(database, folder / "traces", quota.held_out_share, quota)


def numbers(store: TraceStore, **which: bool) -> list[int]:
    return [int(trace.request_id.removeprefix("request-")) for trace in store.load(**which)]


def test_sizes_follow_the_held_out_share() -> None:
    quota = Quota(100, 0.5, 0.2, {"law": 3, "tiny": 2})
    assert [quota.size("code", held_out=side) for side in (False, True)] == [80, 20]
    assert [quota.size("law", held_out=side) for side in (False, True)] == [2, 1]
    assert [quota.size("tiny", held_out=side) for side in (False, True)] == [1, 1]
    settings = RecordSettings(url="sqlite://", folder=Path("x"), trace_quota=100, domain_quotas={"law": 3})
    assert Quota.of(settings) == Quota(100, 0.5, 0.2, {"law": 3})


def test_the_newest_stay_and_the_rest_is_a_sample_that_any_batching_gives(database: Database, tmp_path: Path) -> None:
    quota = Quota(10, 0.5, 0.2)
    traces = [make_trace(seed, prompt=TRAIN) for seed in range(40)]
    store = store_of(database, tmp_path, quota)
    for start in range(0, 40, 7):
        store.add(traces[start : start + 7])
    older = sorted(range(36), key=lambda seed: digest_of(traces[seed]))
    assert numbers(store) == [*sorted(older[:4]), 36, 37, 38, 39]
    other = store_of(database, tmp_path, quota)
    other.add([make_trace(seed, prompt=TRAIN, domain="again") for seed in range(40, 80)])
    single = [make_trace(seed, prompt=TRAIN, domain="again") for seed in range(80, 90)]
    for trace in single:
        other.add([trace])
    assert len(other.load(domains=["again"])) == 8
    assert drop_counts(database) == {("code", "quota"): 32, ("again", "quota"): 42}


def test_older_ones_are_sampled_evenly(tmp_path: Path) -> None:
    """Every trace that is no longer recent has the same chance to be kept, however early it came."""
    database = Database(f"sqlite:///{tmp_path / 'records.db'}")
    database.upgrade()
    quota, rounds, length = Quota(10, 0.5, 0.2), 100, 24
    kept: Counter[int] = Counter()
    with database.session_scope() as session:
        for run in range(rounds):
            for start in range(0, length, 6):
                database.insert_new(session, TraceRow, [_row(run, place) for place in range(start, start + 6)])
                enforce(session, quota, f"d{run}", held_out=False)
        kept.update(session.scalars(select(TraceRow.place)))
    assert all(kept[place] == rounds for place in range(length - 4, length))
    fifths = [sum(kept[place] for place in range(start, start + 4)) for start in range(0, length - 4, 4)]
    assert sum(fifths) == rounds * 4
    assert chisquare(fifths).pvalue > 0.001
    database.close()


def _row(run: int, place: int) -> dict[str, Any]:
    return {
        "digest": hashlib.sha256(f"{run}-{place}".encode()).hexdigest(),
        "shard": "none",
        "place": place,
        "request_id": f"{run}-{place}",
        "domain": f"d{run}",
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "release": 0,
        "held_out": False,
        "at": START,
    }


@pytest.mark.parametrize(("share", "expected"), [(1.0, [8, 9, 10, 11]), (0.0, None)])
def test_the_ends_of_the_recent_share(
    database: Database, tmp_path: Path, share: float, expected: list[int] | None
) -> None:
    store = store_of(database, tmp_path, Quota(5, share, 0.2))
    traces = [make_trace(seed, prompt=TRAIN) for seed in range(12)]
    for trace in traces:
        store.add([trace])
    kept = numbers(store)
    if expected is None:
        expected = sorted(sorted(range(12), key=lambda seed: digest_of(traces[seed]))[:4])
    assert kept == expected


def test_neither_domains_nor_sides_displace_each_other(database: Database, tmp_path: Path) -> None:
    store = store_of(database, tmp_path, Quota(10, 0.5, 0.2))
    store.add([make_trace(seed, prompt=TRAIN, domain="quiet") for seed in range(5)])
    store.add([make_trace(seed, prompt=HELD_OUT) for seed in range(10, 12)])
    for start in range(100, 200, 20):
        store.add([make_trace(seed, prompt=TRAIN) for seed in range(start, start + 20)])
    assert store.count() == {"code": (8, 2), "quiet": (5, 0)}
    assert numbers(store, held_out=True) == [10, 11]
