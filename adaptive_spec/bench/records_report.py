"""The tables of ``adaptive-spec bench-records``."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from adaptive_spec.bench.records_load import Load


def print_report(loads: Sequence[Load], extrapolate: Sequence[int]) -> None:
    """Print what was measured, then what follows for other numbers of tokens."""
    console = Console()
    measured = Table("", *(f"{load.database}, {load.version}" for load in loads), title="Measured")
    rows = [load.to_dict() for load in loads]
    for name, form in (
        ("num_tokens", ",.0f"),
        ("num_steps", ",.0f"),
        ("steps_per_second", ",.0f"),
        ("steps_per_cpu_second", ",.0f"),
        ("rolled_up_steps_per_second", ",.0f"),
        ("bytes_per_million_steps", ",.0f"),
        ("rollup_bytes", ",.0f"),
    ):
        measured.add_row(name, *(format(row[name], form) for row in rows))
    for question in loads[0].latencies_seconds or ():
        times = [(load.latencies_seconds or {})[question] for load in loads]
        measured.add_row(
            f"{question}: best, median", *(f"{1e3 * best:.1f} ms, {1e3 * middle:.1f} ms" for best, middle in times)
        )
    console.print(measured)
    sizes = Table("recorded tokens", *(f"{load.database}, raw bytes" for load in loads), title="Extrapolated")
    for number in extrapolate:
        sizes.add_row(f"{number:,}", *(f"{load.raw_bytes * number / load.num_tokens:,.0f}" for load in loads))
    console.print(sizes)
