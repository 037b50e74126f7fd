"""kill -9 of the real service in mid-traffic: what was written stays, the live release is the same."""

import signal
import threading
import time
from pathlib import Path

from adaptive_spec.core import Thresholds
from adaptive_spec.models.loading import load_pair
from adaptive_spec.records.database import Database
from adaptive_spec.releases.bundle import write_bundle
from adaptive_spec.releases.registry import publish
from adaptive_spec.settings import ModelSettings
from tests.process import call, environment_of, start


def complete(url: str, number: int) -> None:
    body = {
        "prompt": f"request {number}",
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "metadata": {"domain": "a"},
        "speculation": {"chain_length": 3},
    }
    call(f"{url}/v1/completions", body)


def test_kill_and_restart(tmp_path: Path) -> None:
    environment, port = environment_of(tmp_path)
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    process = start(environment, port, log)
    database = Database(f"sqlite:///{tmp_path / 'r.db'}")
    pair = load_pair(ModelSettings(target=str(tmp_path / "target"), draft=str(tmp_path / "draft")))
    write_bundle(
        tmp_path / "releases",
        1,
        adapter=None,
        thresholds={"a": Thresholds(temperature=2.0)},
        provenance={"parent": 0, "hashes": pair.hashes},
    )
    publish(database, tmp_path / "releases", 1, {})
    answered: list[int] = []
    stopping = threading.Event()

    def traffic() -> None:
        while not stopping.is_set():
            try:
                complete(url, len(answered))
            except OSError:
                return
            answered.append(1)

    thread = threading.Thread(target=traffic)
    thread.start()
    deadline = time.monotonic() + 60
    while len(answered) < 30 and time.monotonic() < deadline:
        time.sleep(0.05)
    settled = len(answered)
    time.sleep(1.0)  # several flushes: everything answered before is past the documented bound
    process.send_signal(signal.SIGKILL)
    process.wait()
    stopping.set()
    thread.join()
    process = start(environment, port, log)
    try:
        (row,) = call(f"{url}/api/stats?domain=a")["domains"]
        assert settled <= row["num_requests"] <= len(answered) + 1
        assert row["num_emitted_tokens"] >= settled * 16
        deadline = time.monotonic() + 10
        while call(f"{url}/api/thresholds")["release"] != 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert call(f"{url}/api/thresholds")["release"] == 1
        complete(url, 0)
    finally:
        process.terminate()
        assert process.wait(30) in (0, -signal.SIGTERM)
        database.close()
