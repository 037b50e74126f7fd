"""A domain shift as a picture: the new domain over logged requests, with a marker per release, and what others lost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive_spec.bench.shift_report import (
    RECOVERED,
    change,
    new_domain,
    oracle,
    other_domains,
    points,
    reached,
    sides,
)

_COLOURS = ("#2a6f97", "#d08a5f", "#5f9e6e", "#8f6fb0")
_BAR, _ALLOWED = "#c1553b", 0.01


def draw_shift(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG or SVG; ``compare_chart.check_chart`` says beforehand whether that can be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    domain, others = new_domain(records), other_domains(records)
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(10, 8), dpi=120, layout="constrained", sharex=True)
    bar = oracle(records, domain)
    above.axhline(bar, color=_BAR, linewidth=1, label="oracle, trained offline on all of it")
    above.axhline(RECOVERED * bar, color=_BAR, linewidth=1, linestyle="--", label=f"{RECOVERED:.0%} of it")
    for side, colour in zip(sides(records), _COLOURS, strict=False):
        _new(above, points(records, side, domain), colour, f"replay {side}")
        for place, other in enumerate(others):
            _other(
                below, points(records, side, other), colour, (0, (1 + 2 * place, 1 + place)), f"{other}, replay {side}"
            )
    above.set_title(
        f"{domain}, which traffic has shifted to: emitted tokens a step; numbers are releases, crosses refused ones",
        loc="left",
    )
    below.set_title(
        f"{', '.join(others)}: change since the shift; crosses: candidates that the gate refused", loc="left"
    )
    below.axhspan(-_ALLOWED, _ALLOWED, color="#eeeeee", zorder=0)
    below.set_xlabel(f"logged requests of {domain}")
    below.yaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    for axes in (above, below):
        axes.legend(fontsize=8, frameon=False, ncols=2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)


def _new(axes: Any, rows: Sequence[dict[str, Any]], colour: str, label: str) -> None:
    logged, values = [row["logged"] for row in rows], [row["acceptance_length"] for row in rows]
    axes.plot(logged, values, color=colour, marker="o", markersize=4, label=label)
    if all(row["acceptance_length_low"] is not None for row in rows):
        low, high = ([row[f"acceptance_length_{end}"] for row in rows] for end in ("low", "high"))
        axes.fill_between(logged, low, high, color=colour, alpha=0.12, linewidth=0)
    refused = [row for row in rows if row["verdict"] == "refused"]
    axes.plot([row["logged"] for row in refused], [reached(row) for row in refused], color=colour, marker="x", ls="")
    shown = None
    for row in rows:
        if row["release"] != shown:
            at = (row["logged"], row["acceptance_length"])
            axes.annotate(str(row["release"]), at, (0, 6), textcoords="offset points", fontsize=8, color=colour)
        shown = row["release"]


def _other(axes: Any, rows: Sequence[dict[str, Any]], colour: str, dashes: Any, label: str) -> None:
    logged, changes = [row["logged"] for row in rows], [change(row, rows[0]) for row in rows]
    axes.plot(logged, changes, color=colour, linestyle=dashes, linewidth=1.3, label=label)
    refused = [at for at, row in enumerate(rows) if row["verdict"] == "refused"]
    axes.plot([logged[at] for at in refused], [changes[at] for at in refused], color=colour, marker="x", linestyle="")
