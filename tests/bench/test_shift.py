"""A domain shift from end to end: a tiny pair on disk, runs past the gate, a report and a picture."""

import json
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from adaptive_spec.bench.shift import AFTER, ALL, BEFORE, ORACLE, RECORDS_NAME, Shift, run_shift
from adaptive_spec.bench.shift_chart import draw_shift
from adaptive_spec.bench.shift_report import change, oracle, points, print_report, recovered_after, sides
from adaptive_spec.errors import NotEnoughDataError, SettingsError
from adaptive_spec.pipeline import Pipeline
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import Settings, load_settings
from tests.conftest import byte_tokenizer, tiny_model
from tests.learning.toy import toy_traces


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A recorded database of two domains, and models on disk that have seen neither."""
    (tmp_path / "empty.toml").write_text("")
    monkeypatch.setenv("ADAPTIVE_SPEC_CONFIG", str(tmp_path / "empty.toml"))
    for name in ("target", "draft"):
        tiny_model(0, layers=1 + (name == "target")).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    database = Database(f"sqlite:///{tmp_path / 'recorded.db'}")
    database.upgrade()
    up, down = toy_traces(150, seed=1, domain="up"), toy_traces(150, seed=2, step=5, states=64, domain="down")
    TraceStore(database, tmp_path / "traces", 0.3).add([*up, *down])
    database.close()
    return load_settings(
        {
            "model": {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft"), "threads": 1},
            "records": {
                "url": f"sqlite:///{tmp_path / 'recorded.db'}",
                "folder": tmp_path / "traces",
                "held_out_share": 0.3,
            },
            "learning": {"rank": 8, "max_epochs": 8, "min_traces": 5, "batch_tokens": 128, "learning_rate": 2e-2},
            "decoder": {"max_context_tokens": 64},
        }
    )


@pytest.fixture
def within_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and rehearsal are called, not started: a run has two processes, and a shift has many runs."""

    def call(self: Pipeline, run_id: int, work: Path, module: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        return import_module(module).main([*arguments, "--settings", str(work / "settings.json")]), {}

    monkeypatch.setattr(Pipeline, "_run_child", call)
    monkeypatch.setattr(os, "nice", lambda increment: increment)


@pytest.mark.slow
@pytest.mark.usefixtures("within_this_process")
def test_the_draft_follows_a_shift_and_keeps_the_old_only_with_replay(
    settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, shift = tmp_path / "out", Shift(("up",), "down", every=75)

    def interrupt(title: str, text: str) -> None:
        if text.startswith("judging release 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_shift(settings, out, shift, interrupt)
    begun = (out / RECORDS_NAME).read_text().splitlines()
    assert len(begun) == 4, "the untouched draft and the first release, on two domains each"
    (out / RECORDS_NAME).write_text("\n".join([*begun, *begun[:1], begun[1][:30]]))  # a point, and a line, cut short
    with pytest.raises(SettingsError, match="other options"):
        run_shift(settings, out, replace(shift, every=80))
    told: list[str] = []
    records = run_shift(settings, out, shift, lambda title, text: told.append(text))
    assert not any(text.startswith("run 1 of") for text in told) and any(text.startswith("run 3 of") for text in told)
    assert (out / RECORDS_NAME).read_text().splitlines()[:4] == begun
    assert [json.loads(line) for line in (out / RECORDS_NAME).read_text().splitlines()] == records
    assert sides(records) == [ALL, "0"] and {row["domain"] for row in records} == {"up", "down"}
    assert [row["phase"] for row in records if row["side"] == ORACLE] == [AFTER, AFTER]
    untouched, began = (row for row in records if row["phase"] == BEFORE and row["domain"] == "up")
    assert (untouched["release"], began["release"], began["verdict"]) == (0, 1, "passed")
    assert began["acceptance_length"] > untouched["acceptance_length"]
    followed = points(records, ALL, "down")
    assert [row["logged"] for row in followed[:2]] == [0, 75] and 75 < followed[2]["logged"] <= 150
    assert followed[-1]["release"] >= 2
    assert followed[-1]["acceptance_length"] > 1.5 * followed[0]["acceptance_length"]
    assert oracle(records, "down") > 1.5 * followed[0]["acceptance_length"]
    (_, *kept), (began, *forgot) = points(records, ALL, "up"), points(records, "0", "up")
    assert all(row["verdict"] == "refused" and row["release"] == 1 for row in forgot), (
        "the gate keeps what would forget"
    )
    assert all(change(row, began) < -0.1 for row in forgot)
    assert change(kept[-1], began) > max(change(row, began) for row in forgot)
    draw_shift(records, tmp_path / "shift.png")
    assert (tmp_path / "shift.png").stat().st_size > 10_000
    print_report(records)
    shown = capsys.readouterr().out
    assert "the oracle reaches" in shown and "95% of the oracle" in shown


def test_what_cannot_be_shifted_is_refused_before_the_work(settings: Settings, tmp_path: Path) -> None:
    for shift in (Shift(("up",), "up"), Shift((), "up")):
        with pytest.raises(SettingsError, match="Name domains"):
            run_shift(settings, tmp_path / "out", shift)
    with pytest.raises(SettingsError, match="holds something"):
        run_shift(settings, tmp_path, Shift(("up",), "down"))
    with pytest.raises(NotEnoughDataError, match="'law'"):
        run_shift(settings, tmp_path / "out", Shift(("up",), "law"))
    assert not (tmp_path / "out").exists()


def test_recovery_is_counted_in_logged_requests() -> None:
    def row(side: str, phase: str, logged: int, length: float) -> dict[str, object]:
        return {
            "side": side,
            "phase": phase,
            "logged": logged,
            "acceptance_length": length,
            "domain": "b",
            "is_new": True,
            "release": 1,
        }

    rows = [row(ALL, BEFORE, 0, 1.0), row(ALL, AFTER, 10, 1.8), row(ALL, AFTER, 20, 1.91), row(ORACLE, AFTER, 20, 2.0)]
    assert recovered_after(rows, ALL) == 20
    assert recovered_after([*rows[:2], rows[3]], ALL) is None
