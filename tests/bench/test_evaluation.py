"""Evaluation on held-out traces: a tiny pair, a database, a release and an adapter; the command from end to end."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.bench import evaluation
from adaptive_spec.bench.evaluation import BASE, LIVE, candidates, compare, evaluate
from adaptive_spec.bench.evaluation_report import build_records
from adaptive_spec.core import POOLED, Release, Trace
from adaptive_spec.errors import NotEnoughDataError, SettingsError
from adaptive_spec.learning.distil import distil
from adaptive_spec.learning.evaluate import score
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.releases.bundle import write_bundle
from adaptive_spec.releases.registry import publish
from adaptive_spec.settings import LearningSettings, Settings, load_settings
from tests.learning.toy import toy_traces

runner = CliRunner()
TRAIN = toy_traces(40, seed=1)


@pytest.fixture(scope="module")
def adapter(pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on counting upwards by three."""
    folder = tmp_path_factory.mktemp("adapters") / "counting"
    settings = LearningSettings(rank=8, learning_rate=2e-2, batch_tokens=256, max_epochs=4)
    model, _ = distil(copy.deepcopy(pair.draft), TRAIN, toy_traces(8, seed=2), settings, lambda _: None)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


@pytest.fixture
def state(tmp_path: Path, pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data folder with traces of two domains; the models of its settings are the tiny pair."""
    (tmp_path / "empty.toml").write_text("")
    monkeypatch.setenv("ADAPTIVE_SPEC_CONFIG", str(tmp_path / "empty.toml"))
    monkeypatch.setattr(evaluation, "load_pair", lambda _: replace(pair, draft=copy.deepcopy(pair.draft)))
    folder = tmp_path / "state"
    (folder / "traces").mkdir(parents=True)
    (folder / "releases").mkdir()
    database = Database(f"sqlite:///{folder / 'service.db'}")
    database.upgrade()
    store = TraceStore(database, folder / "traces", 0.5)
    store.add([*toy_traces(60, seed=4, states=64), *toy_traces(30, seed=5, step=5, states=64, domain="sql")])
    database.close()
    yield folder


def settings_of(folder: Path) -> Settings:
    return load_settings(
        {
            "records": {"url": f"sqlite:///{folder / 'service.db'}", "folder": folder / "traces"},
            "releases": {"folder": folder / "releases"},
        }
    )


def put_live(folder: Path, pair: ModelPair, adapter: Path) -> None:
    database = Database(f"sqlite:///{folder / 'service.db'}")
    write_bundle(
        folder / "releases",
        1,
        adapter=adapter,
        thresholds={},
        provenance={"parent": 0, "hashes": pair.hashes},
        vocabulary=list(range(64)),
    )
    publish(database, folder / "releases", 1, {"passed": True})
    database.close()


def test_an_adapter_is_judged_beside_base_and_live(state: Path, pair: ModelPair, adapter: Path) -> None:
    held_out = toy_traces(25, seed=3)
    found = evaluate(settings_of(state), adapters=[adapter])
    assert list(found.drafts) == [BASE, "counting"] and found.live_version is None and found.reference == BASE
    put_live(state, pair, adapter)
    found = evaluate(settings_of(state), adapters=[adapter], releases=["1"], domain="code")
    assert list(found.drafts) == [BASE, LIVE, "release 1", "counting"]
    assert (found.reference, found.live_version) == (LIVE, 1)
    assert set(found.drafts[BASE].domains) == {"code"}
    assert found.drafts[LIVE].num_steps.tolist() == found.drafts["release 1"].num_steps.tolist()

    worn = {BASE: Release(), "counting": Release(adapter=str(adapter))}
    draft = copy.deepcopy(pair.draft)
    shown = compare(replace(pair, draft=draft), worn, held_out, settings_of(state), 4, 0)
    rows = {(row["part"], row.get("domain"), row.get("draft")): row for row in build_records(shown, settings_of(state))}
    base, ours = rows["draft", POOLED, BASE], rows["draft", POOLED, "counting"]
    gain = rows["gain", POOLED, "counting"]
    assert gain["acceptance_length"] == pytest.approx(ours["acceptance_length"] - base["acceptance_length"])
    assert gain["acceptance_length_low"] > 0, "a draft trained on the same rule is better beyond doubt"
    assert ours["expected_acceptance_without_tail"] < ours["expected_acceptance"] <= 1
    assert rows["draft", "code", BASE]["num_requests"] == 25
    assert shown.verdicts["code"].winner == "counting"
    plain = score(pair.draft, held_out)
    assert base["agreement"] == pytest.approx(
        sum(row.agreement * len(trace.top_ids) for row, trace in zip(plain, held_out, strict=True)) / base["num_tokens"]
    )


def test_what_cannot_be_judged_is_told(state: Path, pair: ModelPair, adapter: Path) -> None:
    settings = settings_of(state)
    with pytest.raises(NotEnoughDataError, match="'absent' is held out"):
        evaluate(settings, domain="absent")
    with pytest.raises(SettingsError, match="twice"):
        candidates(settings, pair, [adapter, adapter], [], {})


def test_candidates_are_told_apart_by_name_or_path(pair: ModelPair, tmp_path: Path) -> None:
    paths = [tmp_path / "own", tmp_path / "other" / "own", tmp_path / BASE]
    found = candidates(load_settings(), pair, paths, [], {BASE: Release()})
    assert list(found) == ["own", str(paths[1]), str(paths[2])]
    assert [release.adapter for release in found.values()] == list(map(str, paths))


def test_the_command(state: Path, adapter: Path) -> None:
    json_file, chart = state / "found.json", state / "found.svg"
    result = runner.invoke(
        cli.app,
        [
            *("evaluate", "--traces", str(state), "--adapter", str(adapter), "--chain-length", "3"),
            *("--json", str(json_file), "--chart", str(chart)),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "counting" in result.stdout and "sql" in result.stdout
    records = json.loads(json_file.read_text())
    assert {row["part"] for row in records} == {"draft", "gain", "verdict"}
    assert all(row["chain_length"] == 3 for row in records)
    told = {row["domain"] for row in records if row["part"] == "draft"}
    assert told == {POOLED, "code", "sql"}
    assert "counting" in chart.read_text()
    one = runner.invoke(cli.app, ["evaluate", "--traces", str(state), "--domain", "sql"])
    assert one.exit_code == 0 and "sql (" in one.stdout and "all (" not in one.stdout
    absent = runner.invoke(cli.app, ["evaluate", "--traces", str(state / "absent.db")])
    assert absent.exit_code == 2 and "absent.db" in absent.stderr


def test_few_requests_have_no_interval(state: Path, pair: ModelPair) -> None:
    few: list[Trace] = toy_traces(3, seed=3)
    found = compare(replace(pair, draft=copy.deepcopy(pair.draft)), {BASE: Release()}, few, settings_of(state), 4, 0)
    rows = build_records(found, settings_of(state))
    assert all(row["acceptance_length_low"] is None for row in rows) and len(rows) == 2
