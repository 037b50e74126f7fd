"""SIGTERM to the real service: what runs is answered, what was recorded is written, the process ends well."""

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from adaptive_spec.records.database import Database
from adaptive_spec.records.statistics import domain_statistics
from tests.process import call, environment_of, start


@pytest.mark.parametrize(("drain_seconds", "whole"), [(60, True), (0.3, False)])
def test_sigterm(tmp_path: Path, drain_seconds: float, whole: bool) -> None:
    environment, port = environment_of(
        tmp_path,
        DECODER__DRAIN_SECONDS=drain_seconds,
        DECODER__SLOTS=1,
        DECODER__MAX_CONTEXT_TOKENS=400 if whole else 20_000,
        RECORDS__FLUSH_SECONDS=60,  # nothing is written before the end
        LOG__FORMAT="json",
    )
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    process = start(environment, port, log)
    answers: list[tuple[int, dict[str, Any]]] = []

    def ask() -> None:
        body = {
            "prompt": "a",
            "max_tokens": 300 if whole else 19_000,
            "temperature": 0,
            "ignore_eos": True,
            "speculation": {"chain_length": 0},
        }
        try:
            answers.append((200, call(f"{url}/v1/completions", body)))
        except urllib.error.HTTPError as error:
            answers.append((error.code, json.load(error)))

    thread = threading.Thread(target=ask)
    thread.start()
    active = "adaptive_spec_num_requests_running 1.0"
    deadline = time.monotonic() + 30
    while active not in _metrics(url) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()[-2000:]
    thread.join(10)
    ((status, answer),) = answers
    if whole:
        assert status == 200 and answer["usage"]["completion_tokens"] == 300
    else:
        assert status == 503 and "shutting down" in answer["error"]["message"]
    told = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    (line,) = (line for line in told if line.get("path") == "/v1/completions")
    assert (line["message"], line["status"], line["domain"]) == ("answered", status, "default")
    assert len(line["request_id"]) == 32 and line["completion_id"].startswith("cmpl-")
    assert any(line["logger"].startswith("uvicorn") for line in told)  # the server's lines are like all others
    database = Database(f"sqlite:///{tmp_path / 'r.db'}")
    (stats,) = domain_statistics(database)
    assert stats.num_requests == 1 and (stats.num_emitted_tokens == 300 or not whole)
    database.close()


def _metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        text: str = reply.read().decode()
        return text
