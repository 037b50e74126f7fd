"""An ablation as a table: the gain of each variation over the untouched draft, and against the settings in force."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from adaptive_spec.bench.ablation import BASE
from adaptive_spec.core import POOLED

_VALUE = "acceptance_length"


def summarise(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per variation: mean and standard deviation over seeds of the gain in acceptance length, per domain.

    against_base: mean of the differences to the base with the same seed, pooled; its standard error; None without one.
    """
    base = {row["seed"]: _gain(row, POOLED) for row in records if row["variation"] == BASE}
    rows = []
    for name in dict.fromkeys(row["variation"] for row in records):
        mine = [row for row in records if row["variation"] == name]
        apart = [_gain(row, POOLED) - base[row["seed"]] for row in mine if row["seed"] in base]
        domains = sorted(mine[0]["domains"])
        rows.append(
            {
                "variation": name,
                "num_seeds": len(mine),
                "gain": {domain: float(np.mean([_gain(row, domain) for row in mine])) for domain in domains},
                "gain_deviation": {domain: _deviation([_gain(row, domain) for row in mine]) for domain in domains},
                "against_base": float(np.mean(apart)) if apart else None,
                "against_base_error": _deviation(apart) / len(apart) ** 0.5 if len(apart) > 1 else None,
                "seconds": float(np.mean([row["seconds"] for row in mine])),
            }
        )
    return rows


def print_report(records: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = summarise(records)
    domains = [POOLED, *(domain for domain in rows[0]["gain"] if domain != POOLED)]
    first = records[0]
    title = (
        f"Gain in held-out tokens a step, chains of {first['chain_length']}: {first['num_traces']} traces, "
        f"{first['num_held_out']} held out"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading in ("variation", "seeds", "against base", *("all" if d == POOLED else d for d in domains), "seconds"):
        table.add_column(heading, justify="left" if heading == "variation" else "right")
    for row in rows:
        error = row["against_base_error"]
        apart = "" if row["against_base"] is None or row["variation"] == BASE else f"{row['against_base']:+.3f}"
        gains = (f"{row['gain'][domain]:+.3f} ± {row['gain_deviation'][domain]:.3f}" for domain in domains)
        told = f"{apart} ± {error:.3f}" if apart and error is not None else apart
        table.add_row(row["variation"], str(row["num_seeds"]), told, *gains, f"{row['seconds']:.0f}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _gain(row: dict[str, Any], domain: str) -> float:
    found = row["domains"][domain]
    return float(found[f"{_VALUE}_after"] - found[f"{_VALUE}_before"])


def _deviation(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
