"""What the verifiers cost: flat records, and the table for a person."""

import sys
from collections.abc import Sequence
from typing import Any

from adaptive_spec.bench.compare_report import describe_machine, spread
from adaptive_spec.bench.verification_cost import Measured

GOAL_SHARE = 0.03  # of a step


def build_records(measured: Sequence[Measured], chain_length: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Return one flat record per vocabulary and case."""
    about = {"chain_length": chain_length, "batch": batch, "num_rounds": rounds, **describe_machine()}
    return [
        {
            "vocab": one.vocab,
            "target": one.target,
            "case": cost.case.name,
            "verifier": cost.case.rule.verifier,
            "num_kept": cost.num_kept,
            **spread("forward_seconds", cost.forward_seconds),
            **spread("decision_seconds", cost.decision_seconds),
            **spread("share", cost.shares),
            **about,
        }
        for one in measured
        for cost in one.costs
    ]


def print_report(records: Sequence[dict[str, Any]]) -> None:
    """Print a table per vocabulary, and which shares exceed the goal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    for vocab in dict.fromkeys(row["vocab"] for row in records):
        rows = [row for row in records if row["vocab"] == vocab]
        about = rows[0]
        title = f"Vocabulary {vocab:,}: {about['target']}; chain {about['chain_length']}, batch {about['batch']}"
        table = Table(title=f"{title}; forward {about['forward_seconds'] * 1e3:.0f} ms", box=box.SIMPLE_HEAD)
        for heading in ("verifier", "kept", "decision ms", "quartiles", "share of a step %", "quartiles"):
            table.add_column(heading, justify="left" if heading == "verifier" else "right")
        for row in rows:
            table.add_row(
                row["case"],
                str(row["num_kept"]),
                *_middle_and_quartiles(row, "decision_seconds", 1e3),
                *_middle_and_quartiles(row, "share", 100),
            )
        console.print(table)
        above = [row["case"] for row in rows if row["share"] > GOAL_SHARE]
        console.print(f"Above {GOAL_SHARE * 100:.0f} %: {', '.join(above) or 'none'}.", markup=False)
    about = records[0]
    packages = ", ".join(f"{name} {found}" for name, found in about["versions"].items())
    console.print(
        f"{about['machine']}, {about['cores']} cores, {about['threads']} threads; {packages}; {about['num_rounds']} "
        f"rounds; {about['command']}; {about['at']}",
        markup=False,
    )


def _middle_and_quartiles(row: dict[str, Any], name: str, scale: float) -> tuple[str, str]:
    low, middle, high = (row[f"{name}{part}"] * scale for part in ("_q1", "", "_q3"))
    return f"{middle:.1f}", f"{low:.1f}-{high:.1f}"
