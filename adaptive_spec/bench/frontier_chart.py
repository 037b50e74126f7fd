"""The frontier as a picture: a panel per domain, speed against divergence, a line per verifier."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive_spec.bench.frontier_report import BUDGETS

_COLOURS = {
    "exact": "#333333",
    "ngram": "#c1553b",
    "logits": "#2a6f97",
    "hybrid": "#6a994e",
    "typical": "#8e5ea2",
    "topk_relaxed": "#d99a2b",
}
_MARKS = {
    "decoded for real": {"marker": "D", "markersize": 7, "markeredgecolor": "white"},
    "where it was predicted": {"marker": "o", "markersize": 4},
}
_MOST_SHARE = 0.10  # of divergence, that the picture shows
_COLUMNS = 2


def draw_frontier(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the records; the file's ending says which kind of picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    domains = list(dict.fromkeys(row["domain"] for row in records))
    columns = min(_COLUMNS, len(domains))
    lines = math.ceil(len(domains) / columns)
    figure, grid = pyplot.subplots(
        lines,
        columns,
        figsize=(max(7.5, 6 * columns), 3.9 * lines + 1.5),
        dpi=100,
        layout="constrained",
        squeeze=False,
    )
    for axes in grid.flat[len(domains) :]:
        axes.set_visible(False)
    for axes, domain in zip(grid.flat, domains, strict=False):
        _panel(axes, domain, [row for row in records if row["domain"] == domain])
    handles = {
        text: handle for axes in grid.flat for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    handles |= {text: pyplot.Line2D([], [], color="#777777", linestyle="none", **look) for text, look in _MARKS.items()}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    about = records[0]
    ran = f"{about['target']}, {about['dtype']}, batch {about['batch']}, {about['threads']} threads"
    figure.suptitle(
        "What divergence buys: the fastest decoding within a share of tokens that exact verification would refuse\n"
        f"Higher is faster, further right is less faithful. {ran} of {about['machine']}",
        fontsize=10.5,
    )
    figure.savefig(path)
    pyplot.close(figure)


def _panel(axes: Any, domain: str, rows: list[dict[str, Any]]) -> None:
    curves: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == "frontier":
            curves.setdefault(row["verifier"], []).append(row)
    exact = curves["exact"][-1]["speed"]
    for verifier, points in curves.items():
        if verifier != "exact":
            _curve(axes, verifier, [row for row in points if row["speed"] > exact], exact)
    axes.axhline(exact, color=_COLOURS["exact"], linewidth=1.4, linestyle="--", label="exact speculation, lossless")
    axes.axhline(1, color="#999999", linewidth=1, linestyle=":", label="plain decoding")
    for share in BUDGETS[2:]:
        axes.axvline(100 * share, color="#dddddd", linewidth=0.8, zorder=0)
    for row in rows:
        if row["part"] == "live" and row["live_speed"] is not None and row["chain_length"]:
            _mark(axes, row)
    axes.set_xlim(-0.15, 100 * _MOST_SHARE)
    axes.set_title(domain, fontsize=11, loc="left", fontweight="bold")
    axes.set_xlabel("divergence, % of emitted tokens", fontsize=9)
    axes.set_ylabel("speed, × plain decoding", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _curve(axes: Any, verifier: str, points: list[dict[str, Any]], exact: float) -> None:
    """The best speed within each share of divergence: a staircase that begins where exact speculation is."""
    inside = [row for row in points if row["divergence_share"] <= _MOST_SHARE]
    shares = [0.0, *(row["divergence_share"] for row in inside), _MOST_SHARE]
    speeds = [exact, *(row["speed"] for row in inside)]
    axes.plot(
        [100 * share for share in shares],
        [*speeds, speeds[-1]],
        drawstyle="steps-post",
        color=_COLOURS[verifier],
        linewidth=1.6,
        label=f"{verifier}, predicted",
    )


def _mark(axes: Any, row: dict[str, Any]) -> None:
    """Where a point was measured, tied to where it was predicted."""
    colour = _COLOURS[row["verifier"]]
    x, y = 100 * (row["live_divergence_share"] or 0), row["live_speed"]
    predicted = 100 * row["divergence_share"], row["speed"]
    axes.plot([predicted[0], x], [predicted[1], y], color=colour, linewidth=0.7, linestyle="-", alpha=0.6)
    found, told = _MARKS.values()
    axes.plot(*predicted, color=colour, linestyle="none", zorder=4, **told)
    axes.plot(x, y, color=colour, linestyle="none", clip_on=False, zorder=5, **found)
