"""What an evaluation found: flat records, and the tables for a person."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from adaptive_spec.bench.compare_report import describe_machine
from adaptive_spec.bench.evaluation import BASE, LIVE, Evaluation
from adaptive_spec.core import POOLED
from adaptive_spec.learning.acceptance import figures
from adaptive_spec.learning.contest import COLD_START, SHARED
from adaptive_spec.settings import Settings

_OVERALL = "all"


def build_records(found: Evaluation, settings: Settings) -> list[dict[str, Any]]:
    """Return flat records: a draft on a domain, one draft against another, and the verdict on a domain.

    Domain ``*`` is all of them together.  Each measure comes with its 95 % interval, ``_low`` and ``_high``, both None
    with too few requests; of part ``gain`` it is the difference, requests drawn in pairs.
    """
    about = {
        "chain_length": found.chain_length,
        "live_release": found.live_version,
        "target": settings.model.target,
        "draft_model": settings.model.draft,
        **describe_machine(),
    }
    rows = [*figures(found.drafts, _pairs(list(found.drafts)), found.seed), *_verdicts(found)]
    return [{**row, **about} for row in rows]


def _pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Live against base; every candidate against both."""
    firsts = [name for name in (LIVE, BASE) if name in names]
    others = [(name, against) for name in names if name not in firsts for against in firsts]
    return [(LIVE, BASE), *others] if LIVE in names else others


def _verdicts(found: Evaluation) -> Iterator[dict[str, Any]]:
    for domain, verdict in found.verdicts.items():
        best = found.reference if verdict.winner == SHARED else verdict.winner
        yield {"part": "verdict", "against": found.reference, "best": best, **asdict(verdict), "domain": domain}


# ---- for a person


def print_report(records: Sequence[dict[str, Any]]) -> None:
    """Print the drafts, their differences and, where there are candidates, who is best in each domain."""
    about = records[0]
    print_figures(records, about["chain_length"])
    for row in records:
        if row["part"] == "verdict":
            print(f"{row['domain']}: {_told(row)}")
    print(f"{about['target']}, draft {about['draft_model']}; {about['command']}; {about['at']}")


def print_figures(records: Sequence[dict[str, Any]], chain_length: int) -> None:
    """Print what ``learning.acceptance.figures`` made: a table of drafts and one of their differences."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)

    def show(part: str, title: str, first: Sequence[str], signed: bool) -> None:
        rows = [row for row in records if row["part"] == part]
        if len({row["domain"] for row in rows}) == 2:
            rows = [row for row in rows if row["domain"] != POOLED]  # which is the other one
        if not rows:
            return
        table = Table(title=title, box=box.SIMPLE_HEAD)
        for heading in (*first, *_HEADINGS):
            table.add_column(heading, justify="left" if heading in first else "right")
        before = None
        for row in rows:
            if before is not None and row["domain"] != before:
                table.add_section()
            words = [_domain(row) if row["domain"] != before else "", row["draft"]]
            words += [row["against"]] if "against" in first else []
            # Text, not markup: domains are other people's.
            table.add_row(*map(Text, words), *(_cell(row, measure, signed) for measure in _SHOWN))
            before = row["domain"]
        console.print(table)

    show("draft", f"Held-out requests, chains of {chain_length}", ("domain", "draft"), signed=False)
    show("gain", "Differences on the same requests", ("domain", "draft", "against"), signed=True)
    console.print(
        "Intervals: 95 %, requests drawn. Greedy tokens/step by replay of the recorded text; sampled: expected, at "
        "temperature 1.",
    )


_SHOWN = ("acceptance_length", "sampled_acceptance_length", "agreement", "expected_acceptance")
_HEADINGS = ("greedy tokens/step", "sampled tokens/step", "agreement", "expected acceptance")


def _domain(row: dict[str, Any]) -> str:
    name = _OVERALL if row["domain"] == POOLED else row["domain"]
    return f"{name} ({row['num_requests']} requests)"


def _cell(row: dict[str, Any], measure: str, signed: bool) -> str:
    sign = "+" if signed else ""
    text = f"{row[measure]:{sign}.3f}"
    if row[f"{measure}_low"] is None:
        return text
    return f"{text} [{row[f'{measure}_low']:{sign}.3f}, {row[f'{measure}_high']:{sign}.3f}]"


def _told(row: dict[str, Any]) -> str:
    if row["reason"] == COLD_START:
        return f"{row['num_requests']} held-out requests are too few to tell (learning.own_min_requests)"
    named = (one for one in row["contenders"] if row["winner"] in (SHARED, one["name"]))
    best = next(named)  # the winner, else the one that came nearest
    shown = f"{best['gain_share']:+.1%} tokens a step, at least {best['gain_share_low']:+.1%}"
    if row["winner"] == SHARED:
        return f"{row['against']} stays; {best['name']}, the best candidate, has {shown} (learning.own_margin_share)"
    return f"{row['best']} beats {row['against']}: {shown}"
