"""What training steps cost: flat records, and the summary for a person."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import theilslopes

from adaptive_spec.bench.compare_report import describe_machine, spread
from adaptive_spec.bench.training import StepCost
from adaptive_spec.settings import Settings

GOAL_SHARE = 0.70  # of the bare rate
_SETTLED_SHARE = 0.25  # of the steps, after which the allocator has seen every shape of batch often enough


def build_records(costs: Sequence[StepCost], settings: Settings) -> list[dict[str, Any]]:
    """Return the summary, part ``summary``, and one flat record per step, part ``step``.

    share: of the bare rate, what steps reach: median over the pairs of bare seconds over those of the step, with
    quartiles; cpu_share: the same of seconds on a core.  memory_bytes_per_step: the slope of what the process holds,
    the median over all pairs of steps (Theil-Sen) behind the first quarter, with its 95 % interval.
    """
    tokens = sum(cost.num_tokens for cost in costs)
    summary = {
        "part": "summary",
        "num_steps": len(costs),
        "num_tokens": tokens,
        **spread("share", [cost.bare.seconds / cost.step.seconds for cost in costs]),
        **spread("cpu_share", [cost.bare.cpu_seconds / cost.step.cpu_seconds for cost in costs]),
        "tokens_per_second": tokens / sum(cost.step.seconds for cost in costs),
        "bare_tokens_per_second": tokens / sum(cost.bare.seconds for cost in costs),
        **spread("step_seconds", [cost.step.seconds for cost in costs]),
        **spread("bare_seconds", [cost.bare.seconds for cost in costs]),
        **_memory([cost.memory_bytes for cost in costs]),
        "target": settings.model.target,
        "draft": settings.model.draft,
        "rank": settings.learning.rank,
        "batch_tokens": settings.learning.batch_tokens,
        "loss": settings.learning.loss,
        **describe_machine(),
        "threads": settings.learning.threads,
    }
    steps = [
        {
            "part": "step",
            "step": number,
            "num_tokens": cost.num_tokens,
            "bare_seconds": cost.bare.seconds,
            "step_seconds": cost.step.seconds,
            "bare_cpu_seconds": cost.bare.cpu_seconds,
            "step_cpu_seconds": cost.step.cpu_seconds,
            "memory_bytes": cost.memory_bytes,
        }
        for number, cost in enumerate(costs, start=1)
    ]
    return [summary, *steps]


def settled_after(num_steps: int) -> int:
    """How many steps the slope of memory leaves out."""
    return int(num_steps * _SETTLED_SHARE)


def _memory(held: Sequence[int | None]) -> dict[str, float | None]:
    """Slope and size of the memory of the settled steps."""
    start = settled_after(len(held))
    known = [float(value) for value in held[start:] if value is not None]
    names = ("memory_bytes_per_step", "memory_bytes_per_step_low", "memory_bytes_per_step_high")
    if len(known) < 3 or len(known) < len(held) - start:
        return dict.fromkeys((*names, "memory_bytes_settled", "memory_bytes_at_end"))
    slope, _, low, high = theilslopes(known, np.arange(len(known)))
    return {
        **dict(zip(names, (float(slope), float(low), float(high)), strict=True)),
        "memory_bytes_settled": known[0],
        "memory_bytes_at_end": known[-1],
    }


def print_report(records: Sequence[dict[str, Any]]) -> None:
    """Print what the summary says, and whether the goal is met."""
    from rich.console import Console

    about, console = records[0], Console()
    met = "reached" if about["share"] >= GOAL_SHARE else "missed"
    lines = [
        f"{about['num_steps']} steps, {about['num_tokens']:,} completion tokens: "
        f"{about['tokens_per_second']:.0f} tokens/s, the model alone {about['bare_tokens_per_second']:.0f}",
        f"share of the bare rate: {about['share']:.2f} (quartiles {about['share_q1']:.2f}-{about['share_q3']:.2f}); of "
        f"time on a core {about['cpu_share']:.2f} ({about['cpu_share_q1']:.2f}-{about['cpu_share_q3']:.2f}); goal "
        f"{GOAL_SHARE:.2f} {met}",
        _memory_line(about),
        f"{about['target']}, draft {about['draft']}, rank {about['rank']}, {about['batch_tokens']} tokens a batch, "
        f"{about['loss']}; {about['threads']} threads of {about['machine']}; {about['command']}; {about['at']}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False)


def _memory_line(about: dict[str, Any]) -> str:
    if about["memory_bytes_per_step"] is None:
        return "memory: this system does not tell, or there were too few steps"
    slope, low, high = (about[f"memory_bytes_per_step{end}"] / 1024 for end in ("", "_low", "_high"))
    first, last = about["memory_bytes_settled"] / 2**20, about["memory_bytes_at_end"] / 2**20
    behind = settled_after(about["num_steps"])
    return (
        f"memory behind step {behind}: {first:.0f} to {last:.0f} MiB, {slope:+.2f} KiB a step [{low:+.2f}, {high:+.2f}]"
    )
