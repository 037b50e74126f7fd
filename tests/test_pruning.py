"""One prune() over everything: it counts before it deletes, and a dry run writes nothing."""

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select, update
from typer.testing import CliRunner

from adaptive_spec.cli import app
from adaptive_spec.core import Thresholds
from adaptive_spec.pipeline import RUNS_NAME
from adaptive_spec.pruning import prune
from adaptive_spec.records.calibrations import add_calibration, list_calibrations
from adaptive_spec.records.database import Database
from adaptive_spec.records.drifts import DRIFT, drift_counts
from adaptive_spec.records.events import add_event, list_events
from adaptive_spec.records.runs import create_run, update_run
from adaptive_spec.records.statistics import domain_statistics
from adaptive_spec.records.tables import EvidenceRow, RollupStateRow, StepRow
from adaptive_spec.settings import Settings
from tests.records.rows import make_evidence, make_finish, make_step, record

LATER = datetime.now(UTC) + timedelta(days=1000)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.model_validate(
        {"records": {"url": f"sqlite:///{tmp_path / 'r.db'}"}, "releases": {"folder": tmp_path / "releases"}}
    )


@pytest.fixture
def database(settings: Settings) -> Database:
    database = Database(settings.records.url)
    database.upgrade()
    record(database, make_step("a", 0), make_step("a", 1), make_finish("a"), make_evidence("a"))
    for direction in ("down", "down", "up"):
        add_event(database, DRIFT, {"stream": "acceptance", "direction": direction}, "code")
    add_event(database, "release_swapped", {})
    for _ in range(3):
        add_calibration(database, "code", Thresholds(), {}, 0)
    for state in ("failed", "running", "cancelled"):
        run = create_run(database, "person", {})
        update_run(database, run, state=state, pid=os.getpid())
        (settings.releases.folder / RUNS_NAME / str(run)).mkdir(parents=True)
    return database


def number(database: Database, table: type) -> int:
    with database.session_scope(read_only=True) as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def test_what_is_old_goes_and_what_it_showed_stays(database: Database, settings: Settings) -> None:
    statistics, drifts = domain_statistics(database), drift_counts(database)
    pruned = prune(database, settings, now=LATER)
    assert pruned.rows == {
        "steps": 1,  # the newest stays
        "requests": 1,
        "evidence": 1,
        "events": 1,
        "drifts": 3,
        "calibrations": 2,  # the last one stays
        "minute rollups": pruned.rows["minute rollups"],
        "hour rollups": pruned.rows["hour rollups"],
    }
    assert pruned.rows["minute rollups"] > 0 and pruned.rows["hour rollups"] > 0
    assert pruned.checkpoints == (1, 3)
    assert [folder.name for folder in (settings.releases.folder / RUNS_NAME).iterdir()] == ["2"]
    assert (number(database, StepRow), number(database, EvidenceRow), list_events(database)) == (1, 0, [])
    assert len(list_calibrations(database)) == 1
    assert (domain_statistics(database), drift_counts(database)) == (statistics, drifts)
    assert not prune(database, settings, now=LATER)
    database.close()


def test_what_is_young_stays(database: Database, settings: Settings) -> None:
    early = make_step().at
    assert not prune(database, settings, now=early)
    assert number(database, StepRow) == 2
    database.close()


def test_a_dry_run_writes_nothing(database: Database, settings: Settings) -> None:
    assert prune(database, settings, now=LATER, dry_run=True).rows["steps"] == 0  # not rolled up
    assert number(database, RollupStateRow) == 0
    prune(database, settings, now=make_step().at)
    told = prune(database, settings, now=LATER, dry_run=True)
    assert (told.rows["steps"], told.rows["drifts"], told.checkpoints) == (1, 3, (1, 3))
    assert number(database, StepRow) == 2
    done = prune(database, settings, now=LATER)
    assert done == told
    database.close()


def test_the_command_says_what_it_deletes(
    database: Database, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with database.session_scope() as session:
        session.execute(update(StepRow).values(at=datetime.now(UTC) - timedelta(days=31)))
    database.close()
    monkeypatch.setenv("ADAPTIVE_SPEC_RECORDS__URL", settings.records.url)
    monkeypatch.setenv("ADAPTIVE_SPEC_RELEASES__FOLDER", str(settings.releases.folder))
    dry, real, again = (
        json.loads(CliRunner().invoke(app, ["db", "prune", "--json", *flags], catch_exceptions=False).stdout)
        for flags in (["--dry-run"], [], [])
    )
    assert dry["rows"]["steps"] == 0  # not rolled up yet
    assert (real["rows"]["steps"], again["rows"]["steps"]) == (1, 0)
    told = CliRunner().invoke(app, ["db", "prune", "--dry-run"])
    assert told.exit_code == 0 and "Nothing was deleted" in told.stdout and "calibrations" in told.stdout
