"""An evaluation as a picture: tokens a step of every draft, greedy and sampled, a panel for each domain."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive_spec.bench.evaluation import BASE, LIVE
from adaptive_spec.core import POOLED

_BASE, _LIVE, _CANDIDATES = "#b8b8b8", "#a9d0e0", ("#2a6f97", "#8f6fb0", "#d08a5f", "#5f9e6e")
_KINDS = (("acceptance_length", "greedy"), ("sampled_acceptance_length", "sampled, expected"))


def draw_evaluation(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG or SVG; ``compare_chart.check_chart`` says beforehand whether that can be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in records if row["part"] == "draft"]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    if len(domains) == 2:
        domains.remove(POOLED)  # which then is the other one
    drafts = list(dict.fromkeys(row["draft"] for row in rows))
    size = (12, (0.3 * len(drafts) + 0.75) * len(domains) + 1.0)
    figure, grid = pyplot.subplots(
        len(domains), len(_KINDS), figsize=size, dpi=120, layout="constrained", squeeze=False, sharex="col"
    )
    for line, domain in zip(grid, domains, strict=True):
        its = [row for row in rows if row["domain"] == domain]
        for axes, (measure, kind) in zip(line, _KINDS, strict=True):
            _bars(axes, its, measure)
            name = "all domains together" if domain == POOLED else domain
            axes.set_title(f"{name}, {its[0]['num_requests']} requests: {kind}", fontsize=9, loc="left")
    for axes in grid[-1]:
        axes.set_xlabel("emitted tokens a step", fontsize=8)
    about = records[0]
    figure.suptitle(
        f"Drafts on the same held-out requests, chains of {about['chain_length']}; black lines: 95 % intervals by "
        f"request\n{about['target']}, draft {about['draft_model']}",
        fontsize=10,
    )
    figure.savefig(path)
    pyplot.close(figure)


def _bars(axes: Any, rows: Sequence[dict[str, Any]], measure: str) -> None:
    ends = [row[f"{measure}_high"] or row[measure] for row in rows]
    for place, (row, end) in enumerate(zip(rows, ends, strict=True)):
        value, low = row[measure], row[f"{measure}_low"]
        axes.barh(
            place,
            value,
            xerr=None if low is None else ([max(0.0, value - low)], [max(0.0, end - value)]),
            color=_colour([its["draft"] for its in rows], row["draft"]),
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
        axes.annotate(f"{value:.2f}", (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
    axes.axvline(1.0, color="#c1553b", linewidth=1, linestyle="--", zorder=0)
    axes.set_yticks(range(len(rows)), [row["draft"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(names: Sequence[str], name: str) -> str:
    if name in (BASE, LIVE):
        return _BASE if name == BASE else _LIVE
    others = [other for other in names if other not in (BASE, LIVE)]
    return _CANDIDATES[others.index(name) % len(_CANDIDATES)]
