"""The comparison as a picture: bars per domain, lines for growth."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from adaptive_spec.bench.sides import PLAIN
from adaptive_spec.errors import SettingsError

_OURS, _PEERS, _RULE = "#2a6f97", "#b8b8b8", "#c1553b"
_SHADES = (_OURS, "#61a5c2", "#013a63")  # of our lines
_COLUMNS = 2
_AXES = (("batch", "requests in a batch"), ("prompt_tokens", "tokens of the prompt"))


def check_chart(path: Path) -> None:
    """Say before the measuring what would keep the picture from being written.

    Raises:
        SettingsError: matplotlib is missing, the folder is, or the name ends neither in .png nor in .svg.
    """
    if find_spec("matplotlib") is None:
        raise SettingsError("A chart needs matplotlib: pip install 'adaptive-spec[demo]', or leave --chart out.")
    if path.suffix not in (".png", ".svg"):
        raise SettingsError(f"{path} is neither a .png nor an .svg; name one.")


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel per domain, then tokens/s after the first token against batch and prompt length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in records if row["tokens_per_second"] is not None]
    domains = list(dict.fromkeys(row["domain"] for row in rows if row["part"] == "domains"))
    grown = [row for row in rows if row["part"] == "growth"]
    axes_grown = [(name, label) for name, label in _AXES if len({row[name] for row in grown}) > 1]
    num_lines = math.ceil(len(domains) / _COLUMNS)
    num_sides = len({row["side"] for row in rows})
    heights = [0.3 * num_sides + 0.9] * num_lines + [3.6] * bool(axes_grown)
    figure = pyplot.figure(figsize=(13, sum(heights) + 0.9), dpi=120, layout="constrained")
    grid = figure.add_gridspec(len(heights), _COLUMNS, height_ratios=heights)
    for place, domain in enumerate(domains):
        alone = len(domains) == 1
        axes = figure.add_subplot(grid[0, :] if alone else grid[place // _COLUMNS, place % _COLUMNS])
        _bars(axes, domain, [row for row in rows if row["part"] == "domains" and row["domain"] == domain])
    for place, (name, label) in enumerate(axes_grown):
        other = next(key for key, _ in _AXES if key != name)
        smallest = min(row[other] for row in grown)
        _lines(figure.add_subplot(grid[-1, place]), name, label, [row for row in grown if row[other] == smallest])
    about = records[0]
    figure.suptitle(
        f"{about['target']}, {about['dtype']}, {about['threads']} threads of {about['machine']}: tokens a second, "
        "median and quartiles; × plain: median by turn",
        fontsize=11,
    )
    figure.savefig(path)
    pyplot.close(figure)


def _bars(axes: Any, domain: str, rows: list[dict[str, Any]]) -> None:
    values = [row["tokens_per_second"] for row in rows]
    below = [row["tokens_per_second"] - row["tokens_per_second_q1"] for row in rows]
    above = [row["tokens_per_second_q3"] - row["tokens_per_second"] for row in rows]
    axes.barh(
        range(len(rows)),
        values,
        xerr=(below, above),
        color=[_OURS if row["ours"] else _PEERS for row in rows],
        error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
    )
    plain = next((row["tokens_per_second"] for row in rows if row["side"] == PLAIN), None)
    if plain is not None:
        axes.axvline(plain, color=_RULE, linewidth=1, linestyle="--", zorder=0)
    widest = max(value + more for value, more in zip(values, above, strict=True))
    for place, (row, more) in enumerate(zip(rows, above, strict=True)):
        text = f"{row['ratio_to_plain']:.2f} ×"
        label = axes.text(row["tokens_per_second"] + more + widest * 0.015, place, text, va="center", fontsize=8)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
    axes.set_xlim(0, widest * 1.12)
    axes.set_yticks(range(len(rows)), [row["side"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_title(domain, fontsize=10, loc="left")
    axes.set_xlabel("tokens/s", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _lines(axes: Any, name: str, label: str, rows: list[dict[str, Any]]) -> None:
    sides = list(dict.fromkeys(row["side"] for row in rows))
    for number, side in enumerate(sides):
        mine = sorted((row for row in rows if row["side"] == side), key=lambda row: row[name])
        axes.plot(
            [row[name] for row in mine],
            [row["decode_tokens_per_second"] for row in mine],
            marker="o",
            markersize=4,
            color=_SHADES[number % len(_SHADES)] if mine[0]["ours"] else _PEERS,
            linestyle="-" if mine[0]["ours"] else "--",
            label=side,
        )
    places = sorted({row[name] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(label, fontsize=8)
    axes.set_ylabel("tokens/s after the first token", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
