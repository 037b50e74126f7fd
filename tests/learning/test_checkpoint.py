"""A run that is cut short goes on, and ends where it would have ended."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adaptive_spec.core import Trace
from adaptive_spec.errors import RunError
from adaptive_spec.learning.checkpoint import CHECKPOINT_NAME, read_checkpoint
from adaptive_spec.learning.distil import DistilReport, distil
from adaptive_spec.learning.own import ADAPTER_NAME
from adaptive_spec.learning.pinned import pinned
from adaptive_spec.learning.run import REPORT_NAME
from adaptive_spec.records.database import Database
from adaptive_spec.records.runs import create_run, get_run
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import LearningSettings, Settings, load_settings
from tests.conftest import byte_tokenizer, tiny_model
from tests.learning.toy import tiny_draft, toy_traces

OFTEN = LearningSettings(rank=8, learning_rate=2e-2, batch_tokens=256, max_epochs=3, checkpoint_seconds=1e-9)


class Cut(Exception):
    """What interrupts a run here."""


def train(folder: Path | None, progress: Callable[[dict[str, Any]], None]) -> tuple[dict[str, torch.Tensor], Any]:
    traces, held_out = toy_traces(40, seed=1), toy_traces(6, seed=2)
    model, report = distil(tiny_draft(), traces, held_out, OFTEN, progress, None, folder)
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}, report


def cut_at(step: int) -> Callable[[dict[str, Any]], None]:
    def progress(told: dict[str, Any]) -> None:
        if told["step"] == step:
            raise Cut

    return progress


def timeless(report: DistilReport) -> dict[str, Any]:
    """The report without what a clock says."""
    found = report.to_dict()
    clocks = {"seconds", "tokens_per_second", "bare_tokens_per_second", "throughput_share", "peak_memory_bytes"}
    history = [{name: value for name, value in row.items() if name not in clocks} for row in found.pop("history")]
    return {name: value for name, value in found.items() if name not in clocks} | {"history": history}


def test_an_interrupted_run_ends_like_one_that_was_not(tmp_path: Path) -> None:
    whole, report = train(None, lambda told: None)
    per_epoch = report.steps // 3
    for step in (1, per_epoch, per_epoch + 2, report.steps):  # the first, the last of an epoch, within, the very last
        with pytest.raises(Cut):
            train(tmp_path, cut_at(step))
    seen: list[int] = []
    parts, resumed = train(tmp_path, lambda told: seen.append(told["step"]))
    assert seen == []  # the last cut was after the last step
    assert timeless(resumed) == timeless(report)
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        train(tmp_path, cut_at(2))
    saved = read_checkpoint(tmp_path)
    assert saved is not None and saved.position.step == 2 and saved.optimiser
    path = tmp_path / CHECKPOINT_NAME
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(RunError, match="Delete it"):
        train(tmp_path, lambda told: None)


def test_a_run_goes_on_with_the_traces_it_began_with(tmp_path: Path) -> None:
    training, held_out = toy_traces(6, seed=1), toy_traces(3, seed=2)
    assert pinned(tmp_path, 0, {0}, training, held_out) == (training, held_out)
    later = [*toy_traces(2, seed=3), *reversed(training)]
    again, tested = pinned(tmp_path, 2, {0, 2}, later, [*held_out, *toy_traces(1, seed=4)])  # 2: 0, calibrated
    assert ids(again) == ids(training) and ids(tested) == ids(held_out)
    with pytest.raises(RunError, match="2 of the traces"):
        pinned(tmp_path, 0, {0}, training[2:], held_out)
    with pytest.raises(RunError, match="release 0 and 1 is live"):
        pinned(tmp_path, 1, {1}, training, held_out)


def ids(traces: list[Trace]) -> list[str]:
    return [trace.request_id for trace in traces]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    for name, model in (("target", tiny_model(0)), ("draft", tiny_model(7, layers=1))):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    return load_settings(
        {
            "model": {"target": str(tmp_path / "target"), "draft": str(tmp_path / "draft")},
            "records": {"url": f"sqlite:///{tmp_path / 'r.db'}", "folder": tmp_path / "traces"},
            "releases": {"folder": tmp_path / "releases"},
            "learning": {
                "min_traces": 10,
                "rank": 4,
                "max_epochs": 12,
                "batch_tokens": 64,
                "learning_rate": 1e-4,  # slow: no epoch is the last good one
                "checkpoint_seconds": 0.05,
            },
        }
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_kills_at_random_moments(settings: Settings, tmp_path: Path) -> None:
    """The child's own process, killed and started again until it ends by itself."""
    database = Database(settings.records.url)
    database.upgrade()
    TraceStore(database, settings.records.folder, settings.records.held_out_share).add(
        toy_traces(80, seed=1, states=64, step=5)
    )
    (tmp_path / "settings.json").write_text(settings.model_dump_json())

    def begin(run_id: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "adaptive_spec.learning.run", "--run-id", str(run_id)]
        paths = ["--settings", str(tmp_path / "settings.json"), "--out", str(tmp_path / f"run-{run_id}")]
        return subprocess.Popen([*command, *paths], env={**os.environ, "OMP_NUM_THREADS": "1"})

    def until_it_trains(run_id: int, child: "subprocess.Popen[bytes]", earlier: dict[str, Any]) -> None:
        deadline = time.monotonic() + 60
        while get_run(database, run_id).progress == earlier and child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    first = create_run(database, "test", {})
    child = begin(first)
    until_it_trains(first, child, {})
    loaded = time.monotonic()
    assert child.wait(60) == 0
    training_seconds = time.monotonic() - loaded

    second, chance, killed = create_run(database, "test", {}), random.Random(0), 0
    while True:
        child = begin(second)
        if killed < 20:
            until_it_trains(second, child, get_run(database, second).progress)
            time.sleep(chance.random() * training_seconds / 2)
            child.send_signal(signal.SIGKILL)
        status = child.wait(60)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        read_checkpoint(tmp_path / f"run-{second}")  # whole, or none yet
    assert killed
    outcomes = [tmp_path / f"run-{run_id}" for run_id in (first, second)]
    reports = [(folder / REPORT_NAME).read_text() for folder in outcomes]
    assert all('"stopped": "' in report for report in reports)
    one, other = (load_file(folder / ADAPTER_NAME / "adapter_model.safetensors") for folder in outcomes)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    database.close()
