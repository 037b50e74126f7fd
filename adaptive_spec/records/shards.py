"""Shards: safetensors files of traces.  Which traces count is not decided here but by their rows.

A shard appears under its final name only when every byte is on disk.  It never changes afterwards: leaving a trace
out means writing another shard without it.
"""

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from adaptive_spec.core import Trace
from adaptive_spec.records.tables import TraceRow

SUFFIX = ".safetensors"
UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard as written.  trace_bytes: of each trace in it, its part of the file's header included."""

    name: str
    trace_bytes: tuple[int, ...]


def write_shard(folder: Path, traces: Sequence[Trace]) -> Shard:
    """Write traces as a new shard.

    Raises:
        OSError: the disk refused.  Nothing is left behind then.
    """
    name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}{SUFFIX}"
    tensors = [_tensors(trace) for trace in traces]
    own = [sum(array.nbytes for array in arrays.values()) for arrays in tensors]
    content = save({f"{place}.{key}": array for place, arrays in enumerate(tensors) for key, array in arrays.items()})
    header = -(-(len(content) - sum(own)) // len(own))
    unfinished = folder / (name + UNFINISHED)
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(folder / name)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    return Shard(name, tuple(size + header for size in own))


def read_shard(path: Path, rows: Sequence[TraceRow]) -> dict[int, Trace]:
    """Return the traces of rows that lie in one shard, by the rows' ids.

    Raises:
        SafetensorError: the shard is damaged.
        OSError: it is not there or cannot be read.
    """
    with safe_open(path, framework="numpy") as shard:
        return {
            row.id: Trace(
                request_id=row.request_id,
                domain=row.domain,
                tokens=tuple(shard.get_tensor(f"{row.place}.tokens").tolist()),
                prompt_tokens=row.prompt_tokens,
                top_ids=shard.get_tensor(f"{row.place}.top_ids"),
                top_log_probs=shard.get_tensor(f"{row.place}.top_log_probs"),
                tail_mass=shard.get_tensor(f"{row.place}.tail_mass"),
                release=row.release,
                at=row.at,
            )
            for row in rows
        }


def state_of(path: Path) -> Literal["whole", "damaged", "missing"]:
    """Look whether a shard is there and whole: at its header and size, not at every byte.

    Raises:
        OSError: it cannot be read.
    """
    try:
        with safe_open(path, framework="numpy") as shard:
            return "whole" if shard.keys() else "damaged"
    except FileNotFoundError:
        return "missing"
    except SafetensorError:
        return "damaged"


def _tensors(trace: Trace) -> dict[str, Any]:
    return {
        "tokens": numpy.asarray(trace.tokens, dtype=numpy.int32),
        "top_ids": numpy.ascontiguousarray(trace.top_ids, dtype=numpy.int32),
        "top_log_probs": numpy.ascontiguousarray(trace.top_log_probs, dtype=numpy.float32),
        "tail_mass": numpy.ascontiguousarray(trace.tail_mass, dtype=numpy.float32),
    }


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere folders cannot be opened, and renames are durable by themselves
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
