"""The comparison of length policies as a picture: speed against no speculation, for the mix and for each domain."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive_spec.bench.policies import (
    FIXED,
    LOGISTIC,
    OFF,
    OURS,
    POOLED_THRESHOLDS,
    TRANSFORMERS,
    TRANSFORMERS_CAPPED,
)
from adaptive_spec.bench.policies_report import MIX

_OURS, _OTHERS, _HINDSIGHT, _RULE = "#2a6f97", "#b8b8b8", "#ffffff", "#c1553b"
_COLUMNS = 2
_LABELS = {
    OFF: "no speculation",
    **{name: f"always {length} token{'s' * (length > 1)}" for name, length in FIXED.items()},
    TRANSFORMERS: "transformers' dynamic threshold",
    TRANSFORMERS_CAPPED: "the same, capped at our longest chain",
    LOGISTIC: "logistic estimator as in vLLM",
    POOLED_THRESHOLDS: "one threshold for all domains",
    **{name: f"ours: {name}" for name in OURS},
}


def draw_policies(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG or SVG; ``compare_chart.check_chart`` says beforehand whether that can be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in records if row["part"] == "side"]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    panels = [
        [row for row in rows if row["domain"] == domain] for domain in domains if domain != MIX or len(domains) > 2
    ]
    num_columns = min(_COLUMNS, len(panels))
    num_lines = math.ceil(len(panels) / num_columns)
    size = (6.5 * num_columns, (0.24 * len(panels[0]) + 0.9) * num_lines + 1.1)
    figure, grid = pyplot.subplots(num_lines, num_columns, figsize=size, dpi=120, layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    widest = max(row["ratio_to_off_high"] or row["ratio_to_off"] for row in rows)
    for axes, its in zip(grid.flat, panels, strict=False):
        _bars(axes, its, widest)
    about = records[0]
    batch = "one prompt at a time" if about["batch"] == 1 else f"batches of {about['batch']}"
    figure.suptitle(
        f"Length policies in one decoder, {batch}: tokens a second, no speculation = 1\n"
        f"{about['target']}, {about['dtype']}, {about['threads']} threads of {about['machine']}\n"
        "blue: ours; white: the best fixed length, chosen knowing the outcome; black lines: 95 % intervals",
        fontsize=10,
    )
    figure.savefig(path)
    pyplot.close(figure)


def _bars(axes: Any, rows: Sequence[dict[str, Any]], widest: float) -> None:
    for place, row in enumerate(rows):
        value = row["ratio_to_off"]
        low, high = row["ratio_to_off_low"] or value, row["ratio_to_off_high"] or value
        best = row["side"] != OFF and FIXED.get(row["side"]) == row["best_fixed"]
        axes.barh(
            place,
            value,
            xerr=None if low == high else ([max(0.0, value - low)], [max(0.0, high - value)]),
            color=_OURS if row["ours"] else _HINDSIGHT if best else _OTHERS,
            edgecolor="#666666" if best else "none",
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
        label = axes.text(max(value, high) + widest * 0.015, place, f"{value:.2f}", va="center", fontsize=7)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
        label.set_zorder(4)
    axes.axvline(1.0, color=_RULE, linewidth=1, linestyle="--", zorder=3)
    axes.set_xlim(0, widest * 1.1)
    axes.set_yticks(range(len(rows)), [_LABELS[row["side"]] for row in rows], fontsize=8)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row["ours"] else "normal")
    axes.invert_yaxis()
    axes.set_title(_title(rows[0]), fontsize=9, loc="left")
    axes.set_xlabel("times the tokens/s without speculation", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _title(row: dict[str, Any]) -> str:
    if row["domain"] == MIX:
        return "all domains together, the same tokens of each"
    return f"{row['domain']}; prompts: {row['num_prompts']}, turns: {row['num_turns']}"
