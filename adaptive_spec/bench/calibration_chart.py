"""Calibrations as a picture, a line per domain: reliability, survival, and goodput against the threshold."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptive_spec.core import POOLED

_NEW, _OLD, _RULE = "#2a6f97", "#b8b8b8", "#c1553b"
_LENGTHS = "viridis"


def draw_calibrations(calibrations: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG or SVG of the first entry of each domain; ``compare_chart.check_chart`` says if that can be.

    Args:
        calibrations: as ``GET /api/calibrations`` gives them, the newest first.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    latest: dict[str, Mapping[str, Any]] = {}
    for entry in calibrations:
        latest.setdefault(entry["domain"], entry)
    shown = [entry for _, entry in sorted(latest.items()) if "threshold" in entry["report"]]
    lines = max(1, len(shown))
    figure, grid = pyplot.subplots(lines, 3, figsize=(14, 3.6 * lines), dpi=110, layout="constrained", squeeze=False)
    if not shown:
        figure.suptitle("No domain has enough observations for a calibration yet.", fontsize=11)
    for (reliability, survival, goodput), entry in zip(grid, shown, strict=False):
        report = entry["report"]
        name = "all domains together" if entry["domain"] == POOLED else entry["domain"]
        _reliability(reliability, name, report)
        _survival(survival, report)
        _goodput(goodput, report)
    figure.savefig(path)
    pyplot.close(figure)


def _reliability(axes: Any, name: str, report: Mapping[str, Any]) -> None:
    axes.set_title(f"{name}: confidence and acceptance, later requests", fontsize=9, loc="left")
    axes.plot([0, 1], [0, 1], color=_RULE, linewidth=1, linestyle="--")
    if report["later"] is None:
        axes.text(0.5, 0.5, "too few later requests", ha="center", fontsize=8, color="#777777")
    else:
        for key, label, colour in (("uncalibrated", "uncalibrated", _OLD), ("new", "calibrated", _NEW)):
            check = report["later"]["calibration"][key]
            bins = check["bins"]
            total = max(1, check["num_observations"])
            x, y = [one["confidence"] for one in bins], [one["acceptance"] for one in bins]
            told = f"{label}: error {check['error']:.1%}, by chance {check['by_chance']:.1%}"
            axes.plot(x, y, color=colour, linewidth=1.2, label=told)
            axes.scatter(x, y, s=[12 + 300 * one["count"] / total for one in bins], color=colour, alpha=0.75)
        axes.legend(fontsize=7, loc="upper left", frameon=False)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    _label(axes, "confidence", "share accepted; areas: observations")


def _survival(axes: Any, report: Mapping[str, Any]) -> None:
    axes.set_title("accepted, given reached", fontsize=9, loc="left")
    reached = report["num_by_position"]
    bars = [(f"token {place + 1}", share, reached[place] if place < len(reached) else 0, _NEW)
            for place, share in enumerate(report["survival"])]  # fmt: skip
    bars += [(f"match {one['match_length']}", one["rate"], one["num_reached"], _OLD) for one in report.get("ngram", [])]
    for place, (_, share, count, colour) in enumerate(bars):
        axes.bar(place, share, color=colour)
        axes.text(place, share + 0.02, f"{share:.2f}\n{count}", ha="center", fontsize=7)
    axes.set_xticks(range(len(bars)), [label for label, *_ in bars], fontsize=7, rotation=30)
    axes.set_ylim(0, 1.15)
    _label(axes, "blue: the model's chains by position; grey: n-gram tokens by match length", "share")


def _goodput(axes: Any, report: Mapping[str, Any]) -> None:
    from matplotlib import colormaps

    threshold = report["threshold"]
    grid, stops = threshold["grid"], threshold["stop_below_grid"]
    axes.set_title("predicted goodput of thresholds, one row", fontsize=9, loc="left")
    for length, points in enumerate(grid):
        colour = colormaps[_LENGTHS](length / max(1, len(grid) - 1) * 0.9)
        values = points if len(points) == len(stops) else [points[0]] * len(stops)
        axes.plot(stops, values, color=colour, linewidth=1.3, label="off" if not length else f"at most {length}")
    chosen, now = threshold["chosen"], report["goodput_now"]
    axes.axhline(now, color=_RULE, linewidth=1, linestyle=":", label="old thresholds")
    axes.plot(chosen["stop_below"], chosen["goodput"], "o", color=_RULE, markersize=7, label="best of this domain")
    axes.legend(fontsize=7, frameon=False, ncols=2)
    _label(axes, "stop drafting below this reach", "tokens a second")


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
