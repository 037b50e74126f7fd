"""How far a run is, in a line.  Read by the command line and the page; loads nothing."""

from collections.abc import Mapping
from typing import Any


def progress_line(progress: Mapping[str, Any]) -> str:
    """Say in a line how far a run is: phase, step, loss, held-out acceptance length, rate and time left."""
    shapes = {
        "phase": "{}",
        "step": "step {}",
        "steps": "of {}",
        "loss": "loss {:.3f}",
        "held_out_acceptance_length": "held-out acceptance length {:.2f}",
        "tokens_per_second": "{:.0f} tokens/s",
        "seconds_left": "{:.0f} s left",
    }
    return " ".join(shape.format(progress[name]) for name, shape in shapes.items() if name in progress)
