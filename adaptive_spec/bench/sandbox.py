"""Run a program that nobody has read: what a model wrote.

Each program is a process of its own that ``cage`` locks in before it begins: no network, no new processes, a file
system that can only be read, an empty working directory in memory, hard limits, and an end by the clock.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from adaptive_spec.bench.cage import REFUSED

_CAGE = Path(__file__).with_name("cage.py")
_TAIL_BYTES = 4096
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.  isolated: False leaves out namespaces and filter; limits and the clock still hold."""

    seconds: float = 6.0
    cpu_seconds: int = 3
    memory_bytes: int = 512 * _MEBIBYTE
    file_bytes: int = _MEBIBYTE
    disk_bytes: int = 8 * _MEBIBYTE
    open_files: int = 32
    processes: int = 0  # new ones; root is held to it by the filter alone
    isolated: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    passed: it came to its end without an error.  reason: "passed", "failed", "timeout", or "refused" when it was not
    run because it cannot be locked in here.  message: the last that it wrote to stderr.
    """

    passed: bool
    reason: str
    message: str


def run_program(source: str, limits: Limits | None = None) -> Outcome:
    """Run a program to its end.

    That it got there is told by a secret word written last: a program that exits early has not passed.
    """
    limits = limits or Limits()
    word = secrets.token_hex(16)
    arguments = [sys.executable, "-I", str(_CAGE), json.dumps(asdict(limits))]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="adaptive-spec-sandbox-"))
        program, output, errors = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        program.write(f"{source}\n\nprint('\\n{word}')\n".encode())
        program.seek(0)
        process = subprocess.Popen(
            arguments,
            stdin=program,
            stdout=output,
            stderr=errors,
            cwd=folder,
            env={"PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"},
            start_new_session=True,
            close_fds=True,
        )
        status = _wait(process, limits.seconds)
        said, message = _tail(output), _tail(errors).strip()
    if status is None:
        return Outcome(False, "timeout", message)
    if status == REFUSED and limits.isolated:
        return Outcome(False, "refused", message)
    passed = status == 0 and said.rstrip().endswith(word)
    return Outcome(passed, "passed" if passed else "failed", message)


def why_refused() -> str | None:
    """Why programs cannot be locked in on this system; None when they can."""
    outcome = run_program("")
    return None if outcome.passed else outcome.message or outcome.reason


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit status; None when the clock ended it.  Whatever is left of its session goes with it."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(file: IO[bytes]) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _TAIL_BYTES))
    return file.read().decode(errors="replace")
