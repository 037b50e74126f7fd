"""The child's main entry, called in this process on the tiny pair."""

import copy
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from adaptive_spec.core import Trace
from adaptive_spec.errors import NotEnoughDataError, RunError
from adaptive_spec.learning import run
from adaptive_spec.learning.judge import read_judgement
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.records.database import Database
from adaptive_spec.records.runs import count_traces, create_run, get_run, update_run
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.releases.bundle import read_bundle, verify_adapter, write_bundle
from adaptive_spec.releases.registry import publish
from adaptive_spec.settings import Settings, load_settings
from tests.learning.toy import toy_traces


@pytest.fixture
def settings(tmp_path: Path, pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(run, "load_pair", lambda _: replace(pair, draft=copy.deepcopy(pair.draft)))
    monkeypatch.setattr(os, "nice", lambda increment: increment)
    return load_settings(
        {
            "records": {"url": f"sqlite:///{tmp_path / 'run.db'}", "folder": tmp_path / "traces"},
            "releases": {"folder": tmp_path / "releases"},
            "learning": {"rank": 4, "max_epochs": 2, "min_traces": 10},
        }
    )


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    database = Database(settings.records.url)
    database.upgrade()
    yield database
    database.close()


def start(database: Database, settings: Settings, folder: Path) -> int:
    run_id = create_run(database, "test", {})
    path = folder / "settings.json"
    path.write_text(settings.model_dump_json())
    run.main(["--run-id", str(run_id), "--settings", str(path), "--out", str(folder / f"run-{run_id}")])
    return run_id


def store(database: Database, settings: Settings, traces: list[Trace]) -> None:
    TraceStore(database, settings.records.folder, settings.records.held_out_share).add(traces)


def test_two_runs_the_second_on_top_of_the_first(
    database: Database, settings: Settings, pair: ModelPair, tmp_path: Path
) -> None:
    store(database, settings, toy_traces(60, seed=1, states=64, step=5))
    first = start(database, settings, tmp_path)
    record = get_run(database, first)
    assert (record.state, record.pid, record.progress["phase"]) == ("running", os.getpid(), "distilled")
    adapter = tmp_path / f"run-{first}" / "adapter"
    verify_adapter(adapter, pair.draft)
    report = json.loads((adapter.parent / "distil.json").read_text())
    assert report["provenance"]["hashes"] == pair.hashes and report["provenance"]["parent"] == 0
    assert report["distil"]["steps"] > 0
    folder = write_bundle(settings.releases.folder, 1, adapter=adapter, thresholds={}, provenance=report["provenance"])
    assert read_bundle(folder, draft=pair.draft, hashes=pair.hashes).parent == 0
    publish(database, settings.releases.folder, 1, {"passed": True})
    second = start(database, settings, tmp_path)
    report = json.loads((tmp_path / f"run-{second}" / "distil.json").read_text())
    assert report["provenance"]["parent"] == 1


def test_domains_win_adapters_that_have_to_win_again(
    database: Database, settings: Settings, pair: ModelPair, tmp_path: Path
) -> None:
    own = {"own_min_requests": 5, "own_margin_share": 0.0, "learning_rate": 2e-2, "batch_tokens": 256}
    settings = settings.model_copy(update={"learning": settings.learning.model_copy(update=own)})
    for seed, (domain, step) in enumerate({"code": 3, "sql": 5}.items()):
        store(database, settings, toy_traces(130, seed=seed, states=96, step=step, domain=domain))
    first = tmp_path / f"run-{start(database, settings, tmp_path)}"
    described = json.loads((first / "distil.json").read_text())
    verdicts = get_run(database, 1).report["own_adapters"]
    assert described["provenance"]["own_adapters"] == verdicts
    assert {row["domain"]: row["winner"] for row in verdicts} == {"code": "new", "sql": "new"}, "opposed domains"
    assert all(row["training"]["steps"] > 0 and row["contenders"][0]["gain_share_low"] > 0 for row in verdicts)
    carried = {domain: Path(folder) for domain, folder in described["domain_adapters"].items()}
    assert carried.keys() == {"code", "sql"}
    folder = write_bundle(
        settings.releases.folder,
        1,
        adapter=first / "adapter",
        thresholds={},
        provenance=described["provenance"],
        vocabulary=described["vocabulary"],
        domain_adapters=carried,
    )
    publish(database, settings.releases.folder, 1, {"passed": True}, draft=pair.draft, hashes=pair.hashes)
    gain = get_run(database, 1).report["gain"]
    assert gain["num_new_traces"] == count_traces(database) and 0 < gain["gain_share"] < gain["gain_share_high"]
    update_run(database, 1, state="passed", release=1)

    none_trained = settings.learning.model_copy(update={"own_max_domains": 0, "max_epochs": 1, "learning_rate": 1e-9})
    again = settings.model_copy(update={"learning": none_trained})
    second = tmp_path / f"run-{start(database, again, tmp_path)}"
    after, before = read_judgement(first).after, read_judgement(second).before
    assert after == before, "the gate compares with the live release as it serves: domains under their own adapters"
    verdicts = get_run(database, 2).report["own_adapters"]
    assert [(row["winner"], row["training"]) for row in verdicts] == [("live", None)] * 2
    kept = json.loads((second / "distil.json").read_text())["domain_adapters"]
    assert {Path(adapter).parent.parent for adapter in kept.values()} == {folder}
    assert get_run(database, 2).report["gain"]["num_new_traces"] == 0


def test_a_failure_is_written_to_the_row(database: Database, settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(NotEnoughDataError):
        start(database, settings, tmp_path)
    record = get_run(database, 1)
    assert record.state == "failed" and "0 traces, 10 needed" in str(record.error)


def test_a_run_whose_service_was_killed_ends(
    database: Database, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(database, settings, toy_traces(60, seed=1, states=64, step=5))
    parents = iter([1234, 1234])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))  # after a while, the init process
    with pytest.raises(RunError, match="is gone"):
        start(database, settings, tmp_path)
    assert get_run(database, 1).state == "failed"


def test_a_paused_run_waits_and_its_clock_with_it(database: Database, tmp_path: Path) -> None:
    run_id, flag = create_run(database, "test", {}), tmp_path / run.PAUSE_NAME
    tell = run.RunTeller(database, run_id, flag)
    assert tell({"phase": "distil", "step": 3}) == 0.0
    flag.touch()
    timer = threading.Timer(0.5, flag.unlink)
    timer.start()
    assert tell({"phase": "distil", "step": 4}) >= 0.4
    timer.join()
    assert get_run(database, run_id).progress == {"phase": "paused", "step": 4}
