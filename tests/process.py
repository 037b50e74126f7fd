"""The real service in a process of its own, on tiny models."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.conftest import byte_tokenizer, tiny_model


def environment_of(tmp_path: Path, **more: Any) -> tuple[dict[str, str], int]:
    """Write models and return the environment of a service that uses them, and a free port."""
    for name, model in (("target", tiny_model(0)), ("draft", tiny_model(7, layers=1))):
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "MODEL__TARGET": tmp_path / "target",
        "MODEL__DRAFT": tmp_path / "draft",
        "MODEL__THREADS": 1,
        "DECODER__MAX_CONTEXT_TOKENS": 128,
        "RECORDS__URL": f"sqlite:///{tmp_path / 'r.db'}",
        "RECORDS__FOLDER": tmp_path / "traces",
        "RECORDS__FLUSH_SECONDS": 0.2,
        "RELEASES__FOLDER": tmp_path / "releases",
    }
    environment = {**os.environ, **{f"ADAPTIVE_SPEC_{name}": str(value) for name, value in (settings | more).items()}}
    return environment, port


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def launch(environment: dict[str, str], port: int, log: Path, *flags: str) -> "subprocess.Popen[bytes]":
    """Start the service and do not wait for it."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "adaptive_spec.cli", "serve", "--port", str(port), *flags],
            env=environment,
            stdout=output,
            stderr=output,
        )


def wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            call(f"http://127.0.0.1:{port}/readyz")
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


def start(environment: dict[str, str], port: int, log: Path) -> "subprocess.Popen[bytes]":
    process = launch(environment, port, log)
    wait_until_ready(process, port, log)
    return process
