"""What a comparison of drafts found: flat records, and the tables for a person."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from adaptive_spec.bench.choose_draft import DraftComparison
from adaptive_spec.bench.compare_report import describe_machine, spread
from adaptive_spec.bench.draft_choice import OFF, STEPS, prospects, recommend
from adaptive_spec.core import POOLED
from adaptive_spec.settings import Settings


def build_records(found: DraftComparison, settings: Settings, seed: int = 0) -> list[dict[str, Any]]:
    """Return flat records, for greedy and for sampled requests (``kind``), each domain and all together (``*``).

    Part ``draft``: a candidate on a domain, at its best length and at every other.  Part ``recommended``: what to take
    there, and by how much it beats the runner-up.
    """
    about = {
        "rows": found.rows,
        "verify_seconds": list(found.verify_seconds),
        "target": settings.model.target,
        "dtype": settings.model.dtype,
        "device": settings.model.device,
        **describe_machine(),
    }
    domains = found.drafts[0].sums[0].domains
    numbers = {domain: domains.count(domain) for domain in sorted(set(domains))}
    places = {POOLED: len(domains)} | (numbers if len(numbers) > 1 else {})
    return [
        {"kind": kind, "domain": domain, "num_requests": number, **row, **about}
        for kind in STEPS
        for domain, number in places.items()
        for row in _rows(found, domain, kind, seed)
    ]


def _rows(found: DraftComparison, domain: str, kind: str, seed: int) -> Iterator[dict[str, Any]]:
    judged = prospects(found.drafts, found.verify_seconds, domain, kind, found.rows, seed)
    for draft, its in zip(found.drafts, judged, strict=True):
        yield {
            "part": "draft",
            "draft": draft.name,
            "num_layers": draft.num_layers,
            "vocabulary_tokens": draft.vocabulary_tokens,
            **spread("draft_seconds", draft.samples),
            "acceptance_lengths": list(its.lengths),
            "goodputs": list(its.goodput),
            "chain_length": its.best,
            "acceptance_length": its.lengths[its.best],
            "goodput": its.goodput[its.best],
            "goodput_low": its.interval.low,
            "goodput_high": its.interval.high,
            "ratio_to_off": its.goodput[its.best] / its.goodput[0],
        }
    best = recommend(judged)
    yield {
        "part": "recommended",
        "draft": best.draft,
        "chain_length": best.chain_length,
        "goodput": best.goodput,
        "runner_up": best.runner_up,
        "gain_share": best.gain_share.value,
        "gain_share_low": best.gain_share.low,
        "gain_share_high": best.gain_share.high,
        "certain": best.certain,
    }


# ---- for a person


def print_report(records: Sequence[dict[str, Any]], kind: str) -> None:
    """Print the candidates and what to take, for greedy or for sampled requests."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)
    rows = [row for row in records if row["kind"] == kind]
    table = Table(title=f"Drafts for {kind} requests, each at its best fixed length", box=box.SIMPLE_HEAD)
    for heading in ("domain", "draft", "ms/token", "length", "tokens/step", "tokens/s", "95 %", "× no speculation"):
        table.add_column(heading, justify="left" if heading in ("domain", "draft") else "right")
    before = None
    for row in rows:
        if row["part"] != "draft":
            continue
        if before not in (None, row["domain"]):
            table.add_section()
        around = "-" if row["goodput_low"] is None else f"{row['goodput_low']:.2f}-{row['goodput_high']:.2f}"
        table.add_row(
            Text(_place(row) if row["domain"] != before else ""),
            Text(row["draft"]),
            f"{row['draft_seconds'] * 1e3:.2f}",
            str(row["chain_length"]),
            f"{row['acceptance_length']:.3f}",
            f"{row['goodput']:.2f}",
            around,
            f"{row['ratio_to_off']:.2f}",
        )
        before = row["domain"]
    console.print(table)
    for row in rows:
        if row["part"] == "recommended":
            print(f"{_place(row)}: {told(row)}")
    about = records[0]
    verify = ", ".join(f"{seconds * 1e3:.1f}" for seconds in about["verify_seconds"])
    print(
        f"Verifying chains of 0, 1, 2, … tokens takes {verify} ms, in steps of {rows_of(about)}. "
        "Intervals draw requests; what the measured times may be off by is not in them."
    )
    machine = f"{about['dtype']}, {about['threads']} threads of {about['machine']}"
    print(f"{about['target']}, {machine}; {about['command']}; {about['at']}")


def rows_of(row: dict[str, Any]) -> str:
    """How many rows the steps had."""
    return "one row" if row["rows"] == 1 else f"{row['rows']} rows"


def told(row: dict[str, Any]) -> str:
    """A recommendation as a sentence."""
    taken = OFF if row["draft"] == OFF else f"{row['draft']}, chains of {row['chain_length']}"
    share = f"{row['gain_share']:+.1%}"
    if row["gain_share_low"] is None:
        return f"{taken}; {share} over {row['runner_up']}, on too few requests to be sure"
    around = f"{share} [{row['gain_share_low']:+.1%}, {row['gain_share_high']:+.1%}] over {row['runner_up']}"
    return f"{taken}; {around}" + ("" if row["certain"] else ", which may be as good")


def _place(row: dict[str, Any]) -> str:
    return f"{'all' if row['domain'] == POOLED else row['domain']} ({row['num_requests']} requests)"
