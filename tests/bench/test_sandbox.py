"""Programs that nobody has read do no harm, end soon, and only right ones pass."""

import os
import sys
import time
from pathlib import Path

import pytest

from adaptive_spec.bench.sandbox import Limits, run_program, why_refused

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces are Linux's")
QUICK = Limits(seconds=3, cpu_seconds=1)
GUARDED = """
try:
    {act}
except OSError as error:
    print(error)
else:
    raise SystemExit("it could")
"""


@pytest.fixture(autouse=True, scope="module")
def locks() -> None:
    if (reason := why_refused()) is not None:
        pytest.skip(reason)


def test_right_and_wrong_are_told_apart() -> None:
    assert run_program("def add(a, b):\n    return a + b\n\nassert add(1, 2) == 3").passed
    wrong = run_program("def add(a, b):\n    return a - b\n\nassert add(1, 2) == 3")
    assert (wrong.passed, wrong.reason) == (False, "failed") and "AssertionError" in wrong.message
    assert not run_program("this is no Python").passed


@pytest.mark.parametrize("leaves", ["raise SystemExit(0)", "import os; os._exit(0)"])
def test_leaving_before_the_tests_is_no_pass(leaves: str) -> None:
    assert run_program(leaves + "\nassert False").reason == "failed"


@pytest.mark.parametrize(
    ("act", "limits"),
    [
        ("while True: pass", QUICK),
        ("import time; time.sleep(60)", Limits(seconds=1)),
        ("import signal; signal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass", QUICK),
    ],
)
def test_endless_programs_end(act: str, limits: Limits) -> None:
    began = time.monotonic()
    assert not run_program(act, limits).passed
    assert time.monotonic() - began < 5


def test_a_memory_bomb_fails() -> None:
    outcome = run_program("held = []\nwhile True:\n    held.append(bytearray(1 << 24))", QUICK)
    assert not outcome.passed and outcome.reason == "failed"  # with a MemoryError, if it has memory to say so


@pytest.mark.parametrize(
    "act",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['/bin/sh', '-c', 'true'])",
        "import os; os.posix_spawn('/bin/sh', ['sh', '-c', 'true'], {})",
    ],
)
def test_no_process_can_be_started(act: str) -> None:
    outcome = run_program(GUARDED.format(act=act), QUICK)
    assert outcome.passed, outcome.message


def test_a_fork_bomb_is_none() -> None:
    began = time.monotonic()
    assert "PermissionError" in run_program("import os\nwhile True:\n    os.fork()", QUICK).message
    assert time.monotonic() - began < 3


def test_a_big_file_cannot_be_written() -> None:
    outcome = run_program("with open('big', 'wb') as file:\n    file.write(bytes(1 << 26))", QUICK)
    assert not outcome.passed
    assert run_program("with open('small', 'w') as file:\n    file.write('fine')", QUICK).passed
    many = "for name in range(100):\n    open(str(name), 'wb').write(bytes(1 << 20))"
    assert "No space left" in run_program(many, QUICK).message


def test_nothing_outside_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for act in (f"open({str(tmp_path / 'new')!r}, 'w')", f"__import__('os').remove({str(tmp_path / 'mine')!r})"):
        outcome = run_program(GUARDED.format(act=act), QUICK)
        assert outcome.passed, outcome.message
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1"])
def test_no_socket_can_be_opened(host: str) -> None:
    act = f"import socket; socket.create_connection(({host!r}, 80), 1)"
    outcome = run_program(GUARDED.format(act=act), QUICK)
    assert outcome.passed, outcome.message


def test_nothing_of_the_machine_is_told() -> None:
    source = "import os\nassert os.getpid() == 1 and os.listdir() == [], os.listdir()\nassert 'HOME' not in os.environ"
    outcome = run_program(source)
    assert outcome.passed, outcome.message


def test_where_it_cannot_be_locked_in_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cage = tmp_path / "cage.py"
    real = Path(sys.modules["adaptive_spec.bench.cage"].__file__ or "")
    cage.write_text(real.read_text().replace("libc.unshare(", "(lambda _: -1)("))
    monkeypatch.setattr("adaptive_spec.bench.sandbox._CAGE", cage)
    outcome = run_program("print('ran')")
    assert (outcome.passed, outcome.reason) == (False, "refused")
    assert why_refused() is not None
    assert run_program("print('ran')", Limits(isolated=False)).passed


def test_a_program_that_leaves_its_session_ends_too() -> None:
    source = "import os, time\ntry:\n    os.setsid()\nexcept OSError: pass\nwhile True: time.sleep(1)"
    assert run_program(source, Limits(seconds=1)).reason == "timeout"
    assert not [place for place in map(working_folder, os.listdir("/proc")) if "adaptive-spec-sandbox-" in place]


def working_folder(process: str) -> str:
    try:
        return os.readlink(f"/proc/{process}/cwd")
    except OSError:
        return ""
