"""A comparison of drafts as a picture: predicted goodput against chain length, a panel per domain, a line per draft."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive_spec.bench.choose_draft_report import rows_of, told
from adaptive_spec.core import POOLED

_COLOURS = ("#2a6f97", "#d08a5f", "#5f9e6e", "#8f6fb0", "#013a63", "#b05f7a", "#61a5c2", "#8a8a3d")
_RULE = "#c1553b"
_COLUMNS = 2
_LEGEND_LINES = 0.22  # inches


def draw_choice(records: Sequence[dict[str, Any]], kind: str, path: Path) -> None:
    """Write a PNG or SVG; ``compare_chart.check_chart`` says beforehand whether that can be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in records if row["kind"] == kind]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    drafts = list(dict.fromkeys(row["draft"] for row in rows if row["part"] == "draft"))
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(drafts)}
    num_columns = min(_COLUMNS, len(domains))
    num_lines = math.ceil(len(domains) / num_columns)
    size = (6.5 * num_columns, 3.0 * num_lines + 1.0 + _LEGEND_LINES * len(drafts))
    figure, grid = pyplot.subplots(num_lines, num_columns, figsize=size, dpi=120, layout="constrained", squeeze=False)
    for axes in grid.flat[len(domains) :]:
        axes.set_visible(False)
    for axes, domain in zip(grid.flat, domains, strict=False):
        _lines(axes, [row for row in rows if row["domain"] == domain], colours)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=8, ncols=1)
    about = records[0]
    figure.suptitle(
        f"Predicted tokens a second of {kind} requests by chain length, steps of {rows_of(about)}\n"
        f"{about['target']}, {about['dtype']}, {about['threads']} threads of {about['machine']}\n"
        "black: 95 % intervals by request, at each draft's best length",
        fontsize=10,
    )
    figure.savefig(path)
    pyplot.close(figure)


def _lines(axes: Any, rows: Sequence[dict[str, Any]], colours: dict[str, str]) -> None:
    judged = [row for row in rows if row["part"] == "draft"]
    for row in judged:
        label = f"{row['draft']}: {row['draft_seconds'] * 1e3:.1f} ms a drafted token"
        goodputs = row["goodputs"]
        axes.plot(
            range(len(goodputs)), goodputs, marker="o", markersize=3, color=colours[row["draft"]], label=label, zorder=2
        )
        if row["goodput_low"] is not None:
            around = ([max(0.0, row["goodput"] - row["goodput_low"])], [max(0.0, row["goodput_high"] - row["goodput"])])
            axes.errorbar(row["chain_length"], row["goodput"], yerr=around, color="#333333", elinewidth=1, capsize=2)
    axes.axhline(judged[0]["goodputs"][0], color=_RULE, linewidth=1, linestyle="--", zorder=1)
    best = next(row for row in rows if row["part"] == "recommended")
    name = "all domains together" if best["domain"] == POOLED else best["domain"]
    axes.set_title(f"{name}, {best['num_requests']} requests\n{told(best)}", fontsize=8, loc="left")
    axes.set_xlabel("chain length; 0, dashed: no speculation", fontsize=8)
    axes.set_ylabel("tokens/s", fontsize=8)
    axes.set_xticks(range(len(judged[0]["goodputs"])))
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
