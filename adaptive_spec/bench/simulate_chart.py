"""A simulation as a picture: goodput of each policy against no speculation, a panel for the mix and one per domain."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptive_spec.bench.simulate_records import RecordedSimulation
from adaptive_spec.calibration.outcomes import Outcome
from adaptive_spec.calibration.simulate import BEST_FIXED, FIXED_LENGTHS, OFF, ORACLE, OURS

_OURS, _OTHERS, _BOUND, _RULE = "#2a6f97", "#b8b8b8", "#ffffff", "#c1553b"
_COLUMNS = 2
_LABELS = {
    OFF: "no speculation",
    **{f"fixed {length}": f"always {length} token{'s' * (length > 1)}" for length in FIXED_LENGTHS},
    **{name: f"ours: {name}" for name in OURS},
    "pooled thresholds": "one threshold for all domains",
    "transformers": "transformers' dynamic threshold",
    "logistic": "logistic estimator as in vLLM",
    BEST_FIXED: "best fixed length per domain",
    ORACLE: "oracle, knows what is accepted",
}


def draw_simulation(found: RecordedSimulation, path: Path) -> None:
    """Write a PNG or SVG; ``compare_chart.check_chart`` says beforehand whether that can be."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    simulation = found.simulation
    judged = {one.policy for part in simulation.domains for one in part.outcomes if one.relative is not None}
    panels = [(f"{part.domain}, {part.num_steps} steps of {part.num_requests} requests", part.outcomes)
              for part in simulation.domains]  # fmt: skip
    if simulation.mix and len(panels) > 1:
        panels.insert(0, ("all domains together, by their share of the tokens", simulation.mix))
    panels = [(title, tuple(one for one in outcomes if one.policy in judged)) for title, outcomes in panels]
    missing = [one.policy for one in simulation.domains[0].outcomes if one.policy not in judged]
    num_columns = min(_COLUMNS, len(panels))
    num_lines = math.ceil(len(panels) / num_columns)
    num_bars = len(panels[0][1])
    size = (6.5 * num_columns, (0.24 * num_bars + 0.9) * num_lines + 1.1)
    figure, grid = pyplot.subplots(num_lines, num_columns, figsize=size, dpi=120, layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    widest = max(outcome.high or 0.0 for _, outcomes in panels for outcome in outcomes)
    for axes, (title, outcomes) in zip(grid.flat, panels, strict=False):
        _bars(axes, title, outcomes, widest)
    figure.suptitle(
        f"What each length policy would have made of the recorded traffic of release {found.release}: tokens a second, "
        "no speculation = 1\nblue: ours; white: chosen knowing the outcome; black lines: 95 % intervals by request"
        + (f"; not on record: {', '.join(missing)}" if missing else ""),
        fontsize=10,
    )
    figure.savefig(path)
    pyplot.close(figure)


def _bars(axes: Any, title: str, outcomes: Sequence[Outcome], widest: float) -> None:
    for place, outcome in enumerate(outcomes):
        if outcome.relative is None or outcome.low is None or outcome.high is None:
            axes.text(
                widest * 0.01, place, "cannot be judged here", va="center", fontsize=7, color="#777777", style="italic"
            )
            continue
        interval = ([max(0.0, outcome.relative - outcome.low)], [max(0.0, outcome.high - outcome.relative)])
        axes.barh(
            place,
            outcome.relative,
            xerr=None if outcome.policy == OFF else interval,
            color=_colour(outcome.policy),
            edgecolor="#666666" if outcome.policy in (BEST_FIXED, ORACLE) else "none",
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#333333"},
        )
        text = f"{outcome.relative:.2f}"
        label = axes.text(max(outcome.relative, outcome.high) + widest * 0.015, place, text, va="center", fontsize=7)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
        label.set_zorder(4)
    axes.axvline(1.0, color=_RULE, linewidth=1, linestyle="--", zorder=3)
    axes.set_xlim(0, widest * 1.1)
    axes.set_yticks(range(len(outcomes)), [_LABELS.get(o.policy, o.policy) for o in outcomes], fontsize=8)
    for label, outcome in zip(axes.get_yticklabels(), outcomes, strict=True):
        label.set_fontweight("bold" if outcome.policy in OURS else "normal")
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlabel("times the tokens/s without speculation", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(policy: str) -> str:
    if policy in OURS:
        return _OURS
    return _BOUND if policy in (BEST_FIXED, ORACLE) else _OTHERS
