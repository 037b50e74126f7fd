"""The watch on a real database: what it finds, what it keeps apart, and what outages and restarts do to it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from adaptive_spec.calibration import watch as watch_module
from adaptive_spec.calibration.watch import Drift, DriftWatch, replay
from adaptive_spec.core import Release, Thresholds
from adaptive_spec.records.database import Database
from adaptive_spec.records.drifts import drift_counts
from adaptive_spec.records.events import list_events
from adaptive_spec.settings import DriftSettings
from tests.calibration.recorded import STEPS, record_requests
from tests.records.rows import make_finish, record

SETTINGS = DriftSettings(false_alarm_steps=100_000, min_steps=500)
BASE = Release()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'records.db'}")
    database.upgrade()
    yield database
    database.close()


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database in which a draft has grown stale, recorded once and never written to."""
    path = tmp_path_factory.mktemp("stale") / "records.db"
    database = Database(f"sqlite:///{path}")
    database.upgrade()
    record_requests(database, 150, 0.6, name="before")
    record_requests(database, 80, 0.3, confidence=0.3, name="after", seed=1)
    database.close()  # which brings all of it into the one file
    return path


@pytest.fixture
def stale_database(stale: Path, tmp_path: Path) -> Iterator[Database]:
    """A copy of it."""
    database = Database(f"sqlite:///{shutil.copy(stale, tmp_path / 'stale.db')}")
    yield database
    database.close()


def poll(watch: DriftWatch, release: Release = BASE) -> list[Drift]:
    """Poll until everything is read, and once more for requests whose steps came with the last batch."""
    found = watch.poll(release)
    while not watch.caught_up:
        found += watch.poll(release)
    return found + watch.poll(release)


def told(database: Database) -> list[tuple[str | None, str, str]]:
    events = list_events(database, kind="drift")
    return [(event.domain, event.detail["stream"], event.detail["direction"]) for event in reversed(events)]


def test_a_stale_draft(database: Database) -> None:
    watch = DriftWatch(database, SETTINGS)
    record_requests(database, 150, 0.6, name="before")
    record_requests(database, 150, 0.6, name="other", domain="prose", seed=1)
    assert poll(watch) == [] and told(database) == []
    record_requests(database, 60, 0.3, confidence=0.3, name="after", seed=2)
    (drift,) = poll(watch)
    assert (drift.source.domain, drift.stream, drift.release, drift.shift.direction) == (
        "code",
        "acceptance",
        0,
        "down",
    )
    assert told(database) == [("code", "acceptance", "down")]
    (event,) = list_events(database, kind="drift")
    assert event.release == 0 and event.detail == drift.detail()
    assert event.detail["before"] == pytest.approx(0.6, abs=0.05)
    assert event.detail["after"] == pytest.approx(0.3, abs=0.15)  # of a few requests
    assert 0 < event.detail["num_steps"] <= 60 * STEPS
    assert drift_counts(database) == {("code", "acceptance", "down"): 1}
    assert {state.domain for state in watch.states} == {"code", "prose"}


def test_an_abnormal_rise(database: Database) -> None:
    watch = DriftWatch(database, SETTINGS)
    record_requests(database, 150, 0.6, name="before")
    record_requests(database, 60, 0.95, confidence=0.95, name="after", seed=1)
    poll(watch)
    assert told(database) == [("code", "acceptance", "up")]


@pytest.mark.parametrize(("confidence", "direction"), [(0.9, "down"), (0.3, "up")])
def test_confidence_that_no_longer_means_what_it_did(database: Database, confidence: float, direction: str) -> None:
    watch = DriftWatch(database, SETTINGS)
    record_requests(database, 150, 0.6, name="before")
    record_requests(database, 60, 0.6, confidence=confidence, name="after", seed=1)
    poll(watch)
    assert told(database) == [("code", "calibration", direction)]


def test_confidence_is_read_at_the_temperature_of_the_release(database: Database) -> None:
    record_requests(database, 100, 0.6, name="a", confidence=0.9)
    record_requests(database, 100, 0.6, name="b", confidence=0.9, drafter="ngram")
    live = Release(thresholds=MappingProxyType({"code": Thresholds(temperature=3.0)}))
    means = {state.drafter: state.mean for state in replay(database, SETTINGS, live) if state.stream == "calibration"}
    assert means["model"] == pytest.approx(0.6 - 0.675, abs=0.05)  # sigmoid(logit(.9) / 3)
    assert means["ngram"] == pytest.approx(0.6 - 0.9, abs=0.05)


def test_requests_count_when_they_end(database: Database) -> None:
    watch = DriftWatch(database, SETTINGS)
    record_requests(database, 3, 0.6, name="a", finished=False)
    poll(watch)
    assert watch.states == ()
    record(database, make_finish("a-1"))
    poll(watch)
    assert {state.num_steps for state in watch.states} == {STEPS}


def test_a_release_starts_anew(database: Database) -> None:
    watch = DriftWatch(database, SETTINGS)
    record_requests(database, 150, 0.6, name="before")
    poll(watch)
    record_requests(database, 60, 0.2, confidence=0.2, name="after", release=1, seed=1)
    assert poll(watch, Release(version=1)) == []
    assert {(state.release, state.num_steps) for state in watch.states} == {(1, 60 * STEPS)}
    assert poll(watch) == []  # and a rollback takes up the earlier release's records
    assert {(state.release, state.num_steps) for state in watch.states} == {(0, 150 * STEPS)}


def test_a_restart_resumes_and_tells_nothing_twice(stale_database: Database) -> None:
    first = DriftWatch(stale_database, SETTINGS)
    assert len(poll(first)) == 1
    second = DriftWatch(stale_database, SETTINGS)
    assert poll(second) == [] and second.states == first.states
    assert len(told(stale_database)) == 1
    record_requests(stale_database, 80, 0.9, confidence=0.9, name="later", seed=2)
    assert [drift.shift.direction for drift in poll(second)] == ["up"]


def test_a_life_that_ended_before_it_told_is_made_up_for(stale_database: Database) -> None:
    replay(stale_database, SETTINGS, BASE)
    assert told(stale_database) == []
    poll(DriftWatch(stale_database, SETTINGS))
    assert told(stale_database) == [("code", "acceptance", "down")]


def test_small_batches_read_the_same(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    record_requests(database, 100, 0.6, name="a")
    whole = replay(database, SETTINGS, BASE)
    monkeypatch.setattr(watch_module, "_BATCH_STEPS", 7)
    monkeypatch.setattr(watch_module, "_MAX_OPEN", 5)  # what has ended does not wait for the last batch
    assert replay(database, SETTINGS, BASE) == whole
    monkeypatch.setattr(watch_module, "_RESUMED_STEPS", 30 * STEPS)
    assert {state.num_steps for state in replay(database, SETTINGS, BASE)} == {30 * STEPS}


@pytest.mark.parametrize("failing", range(1, 12))
def test_an_outage_loses_nothing(stale_database: Database, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """Whichever unit of work fails, reading or storing, the next poll makes up for it."""
    real, calls = stale_database.session_scope, 0

    @contextmanager
    def session_scope(**arguments: Any) -> Iterator[Any]:
        nonlocal calls
        calls += 1
        if calls in (failing, failing + 1):
            raise OperationalError("SELECT 1", {}, Exception("server is away"))
        with real(**arguments) as session:
            yield session

    expected = replay(stale_database, SETTINGS, BASE)
    watch, found, outages = DriftWatch(stale_database, SETTINGS), [], 0
    monkeypatch.setattr(stale_database, "session_scope", session_scope)
    for _ in range(8):
        try:
            found += watch.poll(BASE)
        except OperationalError:
            outages += 1
    monkeypatch.undo()
    assert outages == 2
    assert [drift.stream for drift in found] == ["acceptance"]
    assert told(stale_database) == [("code", "acceptance", "down")]
    assert watch.states == expected
