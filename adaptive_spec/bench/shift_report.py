"""A domain shift as tables: how far each release has followed the new domain, and what it cost the others."""

import sys
from collections.abc import Sequence
from typing import Any

from adaptive_spec.bench.shift import AFTER, BEFORE, ORACLE

RECOVERED = 0.95  # of the oracle's acceptance length on the new domain, to have followed the shift


def sides(records: Sequence[dict[str, Any]]) -> list[str]:
    """The sides in their order, the oracle left out."""
    return list(dict.fromkeys(row["side"] for row in records if row["phase"] == AFTER and row["side"] != ORACLE))


def points(records: Sequence[dict[str, Any]], side: str, domain: str) -> list[dict[str, Any]]:
    """What a side reached on a domain by requests logged, the release that it began with first."""
    began = [row for row in records if row["phase"] == BEFORE and row["domain"] == domain][-1:]
    return began + [row for row in records if (row["side"], row["phase"], row["domain"]) == (side, AFTER, domain)]


def oracle(records: Sequence[dict[str, Any]], domain: str) -> float:
    """The oracle's acceptance length on a domain."""
    found = [row for row in records if row["side"] == ORACLE and row["domain"] == domain]
    return float(found[-1]["acceptance_length"])


def new_domain(records: Sequence[dict[str, Any]]) -> str:
    """The domain that traffic shifted to."""
    return str(next(row["domain"] for row in records if row["is_new"]))


def other_domains(records: Sequence[dict[str, Any]]) -> list[str]:
    """The domains that were served before."""
    return list(dict.fromkeys(row["domain"] for row in records if not row["is_new"]))


def recovered_after(records: Sequence[dict[str, Any]], side: str) -> int | None:
    """Logged requests after which a side reached ``RECOVERED`` of the oracle; None: it did not."""
    domain = new_domain(records)
    wanted = RECOVERED * oracle(records, domain)
    return next((row["logged"] for row in points(records, side, domain) if row["acceptance_length"] >= wanted), None)


def reached(row: dict[str, Any]) -> float:
    """The acceptance length of what a run made, whether or not the gate let it serve."""
    candidate = row.get("candidate_acceptance_length")
    return float(row["acceptance_length"] if candidate is None else candidate)


def change(row: dict[str, Any], began: dict[str, Any]) -> float:
    """What a run has changed of a domain since the shift, as a share."""
    return reached(row) / float(began["acceptance_length"]) - 1


def print_report(records: Sequence[dict[str, Any]]) -> None:
    """Print a table per side.  Where the gate refused a candidate, the others' columns show what it would have done."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    domain, others = new_domain(records), other_domains(records)
    bar = oracle(records, domain)
    for side in sides(records):
        title = f"Replay {side}: held-out tokens a step as {domain} is served; the oracle reaches {bar:.3f} there"
        table = Table(title=title, box=box.SIMPLE_HEAD)
        for heading in ("logged", "release", "gate", domain, "of the oracle", *others, "worst of these", "seconds"):
            table.add_column(heading, justify="right")
        columns = [points(records, side, name) for name in (domain, *others)]
        for new, *old in zip(*columns, strict=True):
            changes = [change(row, first[0]) for row, first in zip(old, columns[1:], strict=True)]
            table.add_row(
                str(new["logged"]),
                str(new["release"]),
                new["verdict"],
                _with_interval(new),
                f"{new['acceptance_length'] / bar:.1%}",
                *(f"{reached(row):.3f} ({by:+.1%})" for row, by in zip(old, changes, strict=True)),
                f"{min(changes):+.1%}",
                f"{new['seconds']:.0f}",
            )
        console.print(table)
        found = recovered_after(records, side)
        told = f"after {found} logged requests" if found is not None else "not reached"
        console.print(f"{RECOVERED:.0%} of the oracle: {told}\n", highlight=False)


def _with_interval(row: dict[str, Any]) -> str:
    low, high = row["acceptance_length_low"], row["acceptance_length_high"]
    return f"{row['acceptance_length']:.3f}" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")
