"""How far a run is and what it decided, in a line each.  Read by the command line and the page; loads nothing."""

from collections.abc import Iterable, Mapping
from typing import Any


def progress_line(progress: Mapping[str, Any]) -> str:
    """Say in a line how far a run is: phase, domain, step, loss, held-out acceptance length, rate and time left."""
    shapes = {
        "phase": "{}",
        "domain": "of {}",
        "step": "step {}",
        "steps": "of {}",
        "loss": "loss {:.3f}",
        "held_out_acceptance_length": "held-out acceptance length {:.2f}",
        "tokens_per_second": "{:.0f} tokens/s",
        "seconds_left": "{:.0f} s left",
    }
    return " ".join(shape.format(progress[name]) for name, shape in shapes.items() if name in progress)


def own_adapters_line(verdicts: Iterable[Mapping[str, Any]]) -> str:
    """Say in a line whose adapter each domain got in a run, and by how much it beats or trails the new shared one."""
    return ", ".join(map(_own_adapter, verdicts))


def _own_adapter(verdict: Mapping[str, Any]) -> str:
    said = f"{verdict['domain']}: {verdict['winner']}"
    contenders = verdict["contenders"]
    best = next((its for its in contenders if its["name"] == verdict["winner"]), contenders[0] if contenders else None)
    return f"{said} ({best['name']} {best['gain_share']:+.1%})" if best else said
