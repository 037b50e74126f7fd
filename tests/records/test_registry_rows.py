"""Runs, releases, calibrations and events."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from adaptive_spec.core import Thresholds
from adaptive_spec.errors import ReleaseError, RunError
from adaptive_spec.records.calibrations import add_calibration, list_calibrations
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import add_event, list_events
from adaptive_spec.records.releases import add_release, list_releases, live_version, next_version, set_live
from adaptive_spec.records.runs import active_run, create_run, fail_orphans, get_run, list_runs, update_run
from adaptive_spec.records.tables import RunRow


def states(database: Database) -> dict[int, str]:
    return {record.version: record.state for record in list_releases(database)}


def test_the_life_of_a_run(database: Database) -> None:
    run_id = create_run(database, "person", {"rank": 4})
    active = active_run(database)
    assert active is not None and (active.id, active.state, active.settings) == (run_id, "queued", {"rank": 4})
    update_run(database, run_id, state="running", progress={"step": 1}, pid=os.getpid())
    update_run(database, run_id, progress={"step": 2})
    run = get_run(database, run_id)
    assert (run.state, run.progress, run.pid, run.finished_at) == ("running", {"step": 2}, os.getpid(), None)
    update_run(database, run_id, state="passed", release=3, report={"gain": 0.5})
    run = get_run(database, run_id)
    assert (run.state, run.release, run.report, run.progress) == ("passed", 3, {"gain": 0.5}, {"step": 2})
    assert run.finished_at is not None and run.finished_at >= run.created_at
    assert run.created_at.tzinfo is UTC
    assert active_run(database) is None
    assert [record.id for record in list_runs(database)] == [run_id]


def test_a_cancelled_run_stays_cancelled(database: Database) -> None:
    run_id = create_run(database, "person", {})
    update_run(database, run_id, state="cancelled")
    update_run(database, run_id, state="failed", error="killed")
    assert (get_run(database, run_id).state, get_run(database, run_id).error) == ("cancelled", "killed")


def test_runs_without_a_process_fail(database: Database) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive, queued, silent = (create_run(database, "schedule", {}) for _ in range(4))
    update_run(database, dead, state="running", pid=ended.pid)
    update_run(database, alive, state="running", pid=os.getpid())
    with database.session_scope() as session:
        long_ago = datetime.now(UTC) - timedelta(hours=2)
        session.execute(update(RunRow).where(RunRow.id == silent).values(host="elsewhere", updated_at=long_ago))
    assert fail_orphans(database) == [dead, silent]
    assert get_run(database, dead).state == "failed"
    assert "Start a new run" in (get_run(database, dead).error or "")
    assert (get_run(database, alive).state, get_run(database, queued).state) == ("running", "queued")


def test_unknown_runs_and_states_are_refused(database: Database) -> None:
    with pytest.raises(RunError, match="unknown"):
        get_run(database, 7)
    with pytest.raises(RunError, match="unknown"):
        update_run(database, 7, state="running")
    with pytest.raises(RunError, match="Unknown run state"):
        update_run(database, create_run(database, "x", {}), state="sleeping")


def test_the_life_of_releases(database: Database) -> None:
    assert (live_version(database), next_version(database)) == (0, 1)
    for version in (1, 2, 3):
        add_release(database, version, f"/r/{version}", version - 1, {"gain": version})
    assert next_version(database) == 4
    set_live(database, 1, "gate passed")
    set_live(database, 2, "gate passed")
    assert (live_version(database), states(database)) == (2, {1: "retired", 2: "live", 3: "candidate"})
    set_live(database, 1, "acceptance fell")
    assert (live_version(database), states(database)) == (1, {1: "live", 2: "rolled_back", 3: "candidate"})
    set_live(database, 0, "back to the draft")
    assert (live_version(database), states(database)[1]) == (0, "rolled_back")
    newest = list_events(database, 1, "release_live")[0]
    assert (newest.release, newest.detail) == (0, {"reason": "back to the draft", "before": 1})
    record = list_releases(database)[0]
    assert (record.version, record.folder, record.parent, record.report) == (3, "/r/3", 2, {"gain": 3})


def test_setting_the_live_release_live_again_changes_nothing(database: Database) -> None:
    add_release(database, 1, None, 0, {})
    set_live(database, 1, "first")
    set_live(database, 1, "again")
    assert (live_version(database), states(database)) == (1, {1: "live"})


def test_refused_unknown_and_taken_releases(database: Database) -> None:
    add_release(database, 1, None, 0, {}, state="refused")
    with pytest.raises(ReleaseError, match="refused"):
        set_live(database, 1, "wish")
    with pytest.raises(ReleaseError, match="unknown"):
        set_live(database, 2, "wish")
    with pytest.raises(ReleaseError, match="exists already"):
        add_release(database, 1, None, 0, {})
    with pytest.raises(ReleaseError, match="candidate"):
        add_release(database, 2, None, 0, {}, state="live")
    with pytest.raises(ReleaseError, match="start at 1"):
        add_release(database, 0, None, None, {})
    assert live_version(database) == 0


def test_calibrations_come_back_newest_first(database: Database) -> None:
    thresholds = Thresholds(1.5, 0.3, 5, (0.9, 0.8), 120)
    add_calibration(database, "code", Thresholds(), {}, 1)
    add_calibration(database, "code", thresholds, {"goodput": 2.5}, 2)
    add_calibration(database, "law", Thresholds(), {}, 2)
    newest, oldest = list_calibrations(database, "code")
    assert (newest.thresholds, newest.report, newest.release) == (thresholds, {"goodput": 2.5}, 2)
    assert oldest.release == 1
    assert [record.domain for record in list_calibrations(database, limit=1)] == ["law"]


def test_events_are_filtered_and_limited(database: Database) -> None:
    for number in range(3):
        add_event(database, "swap", {"n": number}, domain="code", release=number)
    add_event(database, "alarm", {})
    assert [event.detail["n"] for event in list_events(database, 2, "swap")] == [2, 1]
    assert [event.kind for event in list_events(database, 1)] == ["alarm"]
    assert list_events(database, kind="swap")[0].domain == "code"
