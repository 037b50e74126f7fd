"""The cost of training steps as a picture: their share of the bare rate, and memory, step by step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive_spec.bench.training_report import GOAL_SHARE, settled_after

_CLOCK, _CORE, _RULE = "#b8b8b8", "#2a6f97", "#c1553b"


def draw_training(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG or SVG; ``compare_chart.check_chart`` says beforehand whether that can be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    about, steps = records[0], records[1:]
    figure, (shares, memory) = pyplot.subplots(1, 2, figsize=(12, 4), dpi=120, layout="constrained")
    numbers = [row["step"] for row in steps]
    for label, name, color in (("by the clock", "seconds", _CLOCK), ("of time on a core", "cpu_seconds", _CORE)):
        values = [row[f"bare_{name}"] / row[f"step_{name}"] for row in steps]
        shares.plot(numbers, values, ".", markersize=4, color=color, label=label)
        shares.axhline(about["share" if name == "seconds" else "cpu_share"], color=color, linewidth=1)
    shares.axhline(GOAL_SHARE, color=_RULE, linewidth=1, linestyle="--", label="goal")
    shares.set_ylim(0, 1.5)
    shares.set_title("share of the bare rate that a step reaches; lines: medians", fontsize=9, loc="left")
    shares.legend(fontsize=8)
    memory.plot(numbers, [(row["memory_bytes"] or 0) / 2**20 for row in steps], color=_CORE)
    memory.axvline(settled_after(len(steps)), color=_CLOCK, linewidth=1, linestyle="--")
    memory.set_ylim(bottom=0)
    memory.set_title("memory of the process, MiB; the slope is taken behind the line", fontsize=9, loc="left")
    for axes in (shares, memory):
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"A training step against forward and backward alone: {about['target']}, draft {about['draft']}, "
        f"{about['batch_tokens']} tokens a batch, {about['threads']} threads of {about['machine']}",
        fontsize=10,
    )
    figure.savefig(path)
    pyplot.close(figure)
