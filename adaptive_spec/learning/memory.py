"""The memory of a training process: a limit, what it holds, and what is said when it ran out.  Called by ``run``."""

import os
from pathlib import Path

from adaptive_spec.errors import RunError

# For glibc: large buffers come back every step, and clearing fresh pages for them costs up to a third of it.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "2000000000", "MALLOC_TRIM_THRESHOLD_": "4000000000"}


def limit_memory(limit_bytes: int) -> None:
    """Let this process hold no more data than that, what it has mapped for itself included; 0: as much as there is.

    Raises:
        RunError: this system cannot limit it.
    """
    if not limit_bytes:
        return
    try:
        import resource  # of Unix alone
    except ImportError as error:
        raise RunError("learning.memory_limit_bytes cannot be kept on this system. Set it to 0.") from error
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def peak_memory_bytes() -> int | None:
    """Return the most that this process has held in memory so far; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def memory_bytes() -> int | None:
    """Return what this process holds in memory now; None where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def told(error: Exception, limit_bytes: int) -> str:
    """Say what ended a run; torch tells of failed allocations as RuntimeError."""
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        limit = f"learning.memory_limit_bytes is {limit_bytes}" if limit_bytes else "the machine has no more"
        return f"Memory ran out: {limit}. Raise it, or lower learning.batch_tokens and raise learning.accumulate."
    return f"{type(error).__name__}: {error}"
