"""Distilling without a service: what is written loads with peft, judges honestly, and never half appears."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.core import POOLED
from adaptive_spec.errors import NotEnoughDataError, SettingsError
from adaptive_spec.learning import offline
from adaptive_spec.learning.evaluate import score
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import Settings, load_settings, placed_at
from tests.learning.toy import toy_traces

LEARNING = {"rank": 8, "learning_rate": 2e-2, "batch_tokens": 256, "max_epochs": 4, "min_traces": 10}


@pytest.fixture
def state(tmp_path: Path, pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "settings.toml").write_text(
        "[learning]\n" + "".join(f"{name} = {value}\n" for name, value in LEARNING.items())
    )
    monkeypatch.setenv("ADAPTIVE_SPEC_CONFIG", str(tmp_path / "settings.toml"))
    monkeypatch.setattr(offline, "load_pair", lambda _: replace(pair, draft=copy.deepcopy(pair.draft)))
    folder = tmp_path / "state"
    (folder / "traces").mkdir(parents=True)
    database = Database(f"sqlite:///{folder / 'service.db'}")
    database.upgrade()
    store = TraceStore(database, folder / "traces", 0.3)
    store.add([*toy_traces(80, seed=4, states=64), *toy_traces(30, seed=5, step=5, states=64, domain="sql")])
    database.close()
    return folder


def settings_of(folder: Path) -> Settings:
    return load_settings(placed_at(str(folder)))


def held_out(folder: Path) -> list[Any]:
    database = Database(f"sqlite:///{folder / 'service.db'}")
    found = TraceStore(database, folder / "traces", 0.3).load(held_out=True)
    database.close()
    return found


def test_the_folder_loads_with_peft_and_drafts_as_reported(state: Path, pair: ModelPair, tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    report = offline.distil_adapter(settings_of(state), tmp_path / "adapter", domain="code", progress=heard.append)
    assert [part["phase"] for part in heard[:2]] == ["load", "judge"] and "loss" in heard[-2]
    rows = {(row["part"], row["domain"], row["draft"]): row for row in report["held_out"]}
    gain = rows["gain", "code", "after"]
    assert gain["acceptance_length_low"] > 0
    assert ("draft", "sql", "after") in rows, "domains that it was not trained on are judged too"
    assert json.loads((tmp_path / "adapter" / "distil.json").read_text()) == json.loads(json.dumps(report))
    assert report["provenance"]["domains"] == ["code"] and report["provenance"]["hashes"] == pair.hashes
    loaded = PeftModel.from_pretrained(copy.deepcopy(pair.draft), str(tmp_path / "adapter"))
    traces = held_out(state)
    its = score(loaded, traces)
    right = sum(row.agreement * len(trace.top_ids) for row, trace in zip(its, traces, strict=True))
    assert right / sum(len(t.top_ids) for t in traces) == pytest.approx(rows["draft", POOLED, "after"]["agreement"])
    with loaded.disable_adapter(), torch.no_grad():
        ids = torch.tensor([[1, 4, 7]])
        torch.testing.assert_close(loaded(ids).logits, pair.draft(ids).logits)


def test_nothing_half_written_appears(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any, **__: Any) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space"):
        offline.distil_adapter(settings_of(state), tmp_path / "adapter")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("adapter")]


def test_what_cannot_be_done_is_told_before_anything_is_trained(state: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SettingsError, match="holds something"):
        offline.distil_adapter(settings_of(state), tmp_path / "full")
    with pytest.raises(SettingsError, match="does not exist"):
        offline.distil_adapter(settings_of(state), tmp_path / "absent" / "adapter")
    with pytest.raises(NotEnoughDataError, match="0 traces of domain 'absent'"):
        offline.distil_adapter(settings_of(state), tmp_path / "adapter", domain="absent")
    assert not (tmp_path / "adapter").exists()


def test_the_command(state: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    asked = ["distil", "--traces", str(state), "--out", str(out), "--epochs", "1", "--rank", "4"]
    result = CliRunner().invoke(cli.app, asked)
    assert result.exit_code == 0, result.output
    assert "before" in result.stdout and "after" in result.stdout and str(out) in result.stdout
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 4
    again = CliRunner().invoke(cli.app, asked)
    assert again.exit_code == 2 and "holds something" in again.stderr
