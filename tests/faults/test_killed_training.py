"""Kill -9 of training processes at random moments, under traffic: nothing but failed runs is left of them."""

import json
import os
import random
import signal
import time
import urllib.error
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from adaptive_spec.records.runs import get_run
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.releases.bundle import read_bundle
from tests.faults.conftest import Place
from tests.faults.traffic import Traffic
from tests.process import call, until

NUM_KILLS = 20
LONGEST_SECONDS = 4


def training_of(service: int) -> int | None:
    """The process that trains for a service, if one runs."""
    for task in Path(f"/proc/{service}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"adaptive_spec.learning.run" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def has_moved(place: Place, run_id: int, progress: dict[str, Any]) -> bool:
    return bool(place.run(run_id)["progress"] != progress)


def has_failed(place: Place, run_id: int) -> bool:
    run = place.run(run_id)
    return run["state"] == "failed" and bool(run["error"])


def go_on(place: Place) -> int:
    """Resume the run that was killed, or begin another if it had no checkpoint yet; return its number."""
    try:
        run_id: int = call(f"{place.url}/api/retrain", {"resume": True})["run_id"]
    except urllib.error.HTTPError as refusal:
        if "has left a checkpoint" not in json.load(refusal)["error"]["message"]:
            raise
        run_id = call(f"{place.url}/api/retrain", {})["run_id"]
    return run_id


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_twenty_kills_cost_runs_and_nothing_else(place: Place) -> None:
    place.store_traces()
    num_traces = len(TraceStore(place.database, place.folder / "traces", 0.2).load())
    training = {"LEARNING__MAX_EPOCHS": 1000, "LEARNING__CHECKPOINT_SECONDS": 0.2, "LEARNING__LEARNING_RATE": 1e-5}
    chance, num_resumed, run_ids = random.Random(0), 0, set()
    with place.serving(**training) as process, Traffic(place.url, place.models.answers, 1) as traffic:
        run_id = call(f"{place.url}/api/retrain", {})["run_id"]
        num_killed = 0
        while num_killed < NUM_KILLS:
            run_ids.add(run_id)
            child = until(lambda: training_of(process.pid))
            if num_killed % 2:  # else it may still be loading its models
                until(partial(has_moved, place, run_id, place.run(run_id)["progress"]))
            time.sleep(chance.uniform(0, LONGEST_SECONDS))
            if training_of(process.pid) != child:  # it has learned all it could
                run_id = until(lambda: call(f"{place.url}/api/retrain", {})["run_id"])
                continue
            os.kill(child, signal.SIGKILL)
            num_killed += 1
            until(partial(has_failed, place, run_id))
            assert place.live() == 0
            before, run_id = run_id, until(lambda: go_on(place))
            num_resumed += run_id == before
        call(f"{place.url}/api/runs/{run_id}/cancel", {})
        until(lambda: place.run(run_id)["state"] == "cancelled")
        traffic.more()
    traffic.check()
    assert process.returncode == 0
    place.check_records(traffic)
    print(f"{NUM_KILLS} kills: {num_resumed} resumed, {len(run_ids)} runs, {len(traffic.answered)} answers, none wrong")
    assert num_resumed
    assert {get_run(place.database, each).state for each in run_ids} <= {"failed", "cancelled", "refused"}
    for folder in place.releases.glob("release-*"):
        read_bundle(folder)  # whole, though the gate refused it
    assert len(TraceStore(place.database, place.folder / "traces", 0.2).load()) >= num_traces
