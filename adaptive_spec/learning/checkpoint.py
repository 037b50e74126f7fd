"""Where a training run stands, in one file that is there whole or not at all.

Tensors and position cannot come apart: the position is JSON in the header of the safetensors file, which is written
under another name, flushed and renamed.  Called by ``distil``.  Nothing here is pickled.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from adaptive_spec.errors import RunError

CHECKPOINT_NAME = "checkpoint.safetensors"
_POSITION = "position"


@dataclass(slots=True)
class Position:
    """How far a run has come.

    epochs: that are over; steps_of_epoch, loss_sum: of the one under way.  best_epoch: 0 is the start.  seconds: of
    work, over all of its processes, pauses left out; training_seconds: of these, those between held-out evaluations.
    bare_tokens, bare_seconds: completion tokens that went through the bare model, and how long that took
    (``throughput``).  history: a row per evaluation.
    """

    epochs: int = 0
    steps_of_epoch: int = 0
    loss_sum: float = 0.0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    bare_tokens: int = 0
    bare_seconds: float = 0.0
    best_epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A position and its tensors, by name.  optimiser: state of trained parameter i under ``i.NAME``."""

    position: Position
    adapter: Mapping[str, Tensor]
    best: Mapping[str, Tensor]
    optimiser: Mapping[str, Tensor]


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the folder's checkpoint.  A kill at any moment leaves the old one or the new one."""
    tensors = {
        f"{part}/{name}": tensor.detach().cpu().contiguous()
        for part in ("adapter", "best", "optimiser")
        for name, tensor in getattr(checkpoint, part).items()
    }
    unfinished = folder / (CHECKPOINT_NAME + ".unfinished")
    save_file(tensors, unfinished, metadata={_POSITION: json.dumps(asdict(checkpoint.position))})
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(folder / CHECKPOINT_NAME)


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the folder's checkpoint, on the CPU; None where there is none.

    Raises:
        RunError: the file is damaged or of another version.
    """
    path = folder / CHECKPOINT_NAME
    if not path.exists():
        return None
    parts: dict[str, dict[str, Tensor]] = {"adapter": {}, "best": {}, "optimiser": {}}
    try:
        with safe_open(path, framework="pt") as file:
            position = Position(**json.loads(file.metadata()[_POSITION]))
            for name in file.keys():  # noqa: SIM118 - no mapping
                part, _, rest = name.partition("/")
                parts[part][rest] = file.get_tensor(name)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}). Delete it, and start a new run.") from error
    return Checkpoint(position, **parts)


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state, flat; empty before its first step."""
    state = optimiser.state_dict()["state"]
    return {f"{index}.{name}": tensor for index, values in state.items() for name, tensor in values.items()}


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put back what ``optimiser_tensors`` gave, into an optimiser of the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for flat, tensor in tensors.items():
        index, _, name = flat.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})
