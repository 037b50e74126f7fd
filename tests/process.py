"""The real service in a process of its own, on tiny models."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.children import PATIENCE
from tests.conftest import byte_tokenizer, tiny_model


def environment_of(tmp_path: Path, models: Path | None = None, **more: Any) -> tuple[dict[str, str], int]:
    """Return the environment of a service that keeps everything in ``tmp_path``, and a free port.

    Args:
        models: a folder with ``target`` and ``draft``; None: they are written to ``tmp_path``.
        more: settings by the names of their variables, without the prefix.
    """
    models = models or _write_models(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "MODEL__TARGET": models / "target",
        "MODEL__DRAFT": models / "draft",
        "MODEL__THREADS": 1,
        "DECODER__MAX_CONTEXT_TOKENS": 128,
        "RECORDS__URL": f"sqlite:///{tmp_path / 'r.db'}",
        "RECORDS__FOLDER": tmp_path / "traces",
        "RECORDS__FLUSH_SECONDS": 0.2,
        "RELEASES__FOLDER": tmp_path / "releases",
    }
    environment = {**os.environ, **{f"ADAPTIVE_SPEC_{name}": str(value) for name, value in (settings | more).items()}}
    return environment, port


def _write_models(folder: Path) -> Path:
    for name, model in (("target", tiny_model(0)), ("draft", tiny_model(7, layers=1))):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    return folder


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30 * PATIENCE) as reply:
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


def wait_until_ready(process: "subprocess.Popen[bytes]", port: int, log: Path, seconds: float = 120) -> None:
    try:
        until(lambda: _is_ready(process, port), seconds)
    except BaseException:
        process.kill()
        process.wait()
        raise AssertionError(log.read_text()[-2000:]) from None


def start(environment: dict[str, str], port: int, log: Path) -> "subprocess.Popen[bytes]":
    process = launch(environment, port, log)
    wait_until_ready(process, port, log)
    return process


def _is_ready(process: "subprocess.Popen[bytes]", port: int) -> bool:
    if process.poll() is not None:
        raise RuntimeError("it has ended")
    return call(f"http://127.0.0.1:{port}/readyz")["status"] == "ok"


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End a service as an operator does, if it still runs."""
    process.terminate()
    try:
        process.wait(90 * PATIENCE)
    finally:
        process.kill()
        process.wait()


def until(found: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until something is so, and return it.  A service that does not answer is asked again."""
    deadline = time.monotonic() + seconds * PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, HTTPException):
            if result := found():
                return result
        time.sleep(0.05)
    raise AssertionError("it did not come true in time")
