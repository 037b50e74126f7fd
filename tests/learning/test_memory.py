"""The limit holds in a process, and its error says what to do."""

import subprocess
import sys

import pytest

from adaptive_spec.learning.memory import peak_memory_bytes, told

LIMIT = 1 << 30


def test_a_limit_is_told_with_what_to_do() -> None:
    code = (
        "from adaptive_spec.learning.memory import limit_memory, told\n"
        f"limit_memory({LIMIT})\n"
        "try:\n    bytearray(2 << 30)\n"
        f"except MemoryError as error:\n    print(told(error, {LIMIT}))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.startswith(f"Memory ran out: learning.memory_limit_bytes is {LIMIT}. Raise it, or lower")


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), "Memory ran out"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."), "Memory ran out: the machine has no more"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)
def test_what_ended_a_run(error: Exception, start: str) -> None:
    assert told(error, 0).startswith(start)


def test_the_peak_counts_bytes() -> None:
    found = peak_memory_bytes()
    assert found is not None and 1 << 24 < found < 1 << 40
