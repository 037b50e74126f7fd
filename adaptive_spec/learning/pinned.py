"""What a run began with, so that it goes on with the very same after its process was killed.

Meanwhile traffic has brought new traces, and retention may have removed old ones; a plan of batches means something
only for the traces it was made of.  Called by ``run``.
"""

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from adaptive_spec.core import Trace
from adaptive_spec.errors import RunError

PINNED_NAME = "beginning.json"


def pinned(
    folder: Path, parent: int, alike: Collection[int], training: Sequence[Trace], held_out: Sequence[Trace]
) -> tuple[list[Trace], list[Trace]]:
    """Return the traces the run of this folder began with, out of those stored now; a new run begins with all.

    Args:
        parent: the release that is live now.
        alike: those that draft with its weights, itself included: a calibration since then changes nothing here.

    Raises:
        RunError: it began on the weights of another release, or some of its traces are gone.
    """
    path = folder / PINNED_NAME
    if not path.exists():
        _write(path, {"parent": parent, "training": [*map(_key, training)], "held_out": [*map(_key, held_out)]})
        return list(training), list(held_out)
    began: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if began["parent"] not in alike:
        raise RunError(f"The run began on release {began['parent']} and {parent} is live now. Start a new run.")
    return _found(began["training"], training), _found(began["held_out"], held_out)


def _found(keys: Sequence[str], traces: Sequence[Trace]) -> list[Trace]:
    stored = {_key(trace): trace for trace in traces}
    missing = sum(key not in stored for key in keys)
    if missing:
        raise RunError(f"{missing} of the traces that the run began with are gone. Start a new run.")
    return [stored[key] for key in keys]


def _key(trace: Trace) -> str:
    said = f"{trace.request_id} {trace.prompt_tokens} {','.join(map(str, trace.tokens))}"
    return hashlib.sha256(said.encode()).hexdigest()


def _write(path: Path, value: dict[str, Any]) -> None:
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
