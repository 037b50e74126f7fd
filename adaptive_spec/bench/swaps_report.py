"""How ``bench-swap`` shows its times."""

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from adaptive_spec.bench.swaps import SwapTimes

_ROWS = {
    "step": "steps",
    "pause": "pauses",
    "first step after a swap": "first_steps",
    "step beside a preparation": "steps_beside",
    "preparation": "preparations",
}


def build_records(times: SwapTimes) -> list[dict[str, Any]]:
    """Return a record per kind of time, in seconds; without those that did not occur."""
    found = []
    for name, attribute in _ROWS.items():
        seconds = getattr(times, attribute)
        if seconds:
            p50, p99 = np.percentile(seconds, [50, 99])
            found.append(
                {
                    "what": name,
                    "rows": times.rows,
                    "count": len(seconds),
                    "p50_seconds": float(p50),
                    "p99_seconds": float(p99),
                    "max_seconds": max(seconds),
                }
            )
    return found


def print_report(times: SwapTimes) -> None:
    """Print the table and how the pause compares with a step."""
    table = Table(title=f"Exchanges of releases at batch {times.rows}, ms")
    for heading in ("", "count", "p50", "p99", "longest"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in build_records(times):
        numbers = (f"{row[name] * 1e3:.2f}" for name in ("p50_seconds", "p99_seconds", "max_seconds"))
        table.add_row(row["what"], str(row["count"]), *numbers)
    console = Console()
    console.print(table)
    within = "within" if times.longest_share <= 1 else "ABOVE"
    console.print(f"p99 of the pause is {times.longest_share:.3f} of the median step: {within} the aim of one step.")
