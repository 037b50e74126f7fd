"""What the comparison found: flat records, and the tables for a person."""

import os
import platform
import shlex
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from adaptive_spec.bench.compare import Cell
from adaptive_spec.bench.sides import PEERS, Turn
from adaptive_spec.core import StepCost
from adaptive_spec.settings import Settings

_PACKAGES = ("adaptive-spec", "torch", "transformers", "flashspec")


def build_records(cells: Sequence[Cell], about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one flat record per cell; ``about`` is repeated in each."""
    return [{**_figures(cell), **about} for cell in cells]


def describe(settings: Settings, release: str | None, cost: StepCost) -> dict[str, Any]:
    """What every record says of machine, models, versions, command and date."""
    return {
        "target": settings.model.target,
        "draft": settings.model.draft,
        "release": release,
        "dtype": settings.model.dtype,
        "device": settings.model.device,
        "cost_draft_seconds": cost.draft_seconds,
        "cost_verify_seconds": list(cost.verify_seconds),
        **describe_machine(),
    }


def describe_machine() -> dict[str, Any]:
    """Machine, versions, command and date."""
    return {
        "machine": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _figures(cell: Cell) -> dict[str, Any]:
    workload, turns = cell.workload, cell.turns
    figures: dict[str, Any] = {
        "part": workload.part,
        "side": cell.side,
        "ours": cell.side not in PEERS,
        "domain": workload.domain,
        "batch": workload.batch,
        "prompt_tokens": workload.prompt_tokens,
        "max_tokens": workload.tasks[0].max_tokens,
        "num_prompts": sum(len(task.prompts) for task in workload.tasks),
        "num_turns": len(turns),
        "skipped": cell.skipped,
        **spread("tokens_per_second", [turn.tokens_per_second for turn in turns]),
        **spread("ratio_to_plain", cell.ratios),
        "decode_tokens_per_second": _median(
            [t.decode.num_tokens / t.decode.seconds for t in turns if t.decode.seconds]
        ),
        "time_to_first_token_seconds": _median([turn.first_token_seconds for turn in turns]),
        "accepted_length": _share(sum(t.num_tokens for t in turns), sum(t.num_row_steps for t in turns)),
        "num_answers": cell.num_answers,
        "identical": cell.num_identical,
        "ties": cell.num_ties,
    }
    return figures | _shares(turns)


def _shares(turns: Sequence[Turn]) -> dict[str, float | None]:
    """Of the decode phase: in the drafter, in the target, and the rest, which is the loop's own."""
    total = sum(turn.decode.seconds for turn in turns)
    draft = _known_sum([turn.decode.draft_seconds for turn in turns])
    verify = _known_sum([turn.decode.verify_seconds for turn in turns])
    if not total or draft is None or verify is None:
        return {"draft_share": None, "verify_share": None, "other_share": None}
    return {
        "draft_share": draft / total,
        "verify_share": verify / total,
        "other_share": max(0.0, 1 - (draft + verify) / total),
    }


def spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Median and quartiles."""
    if not values:
        return {name: None, f"{name}_q1": None, f"{name}_q3": None}
    low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else list(values) * 3
    return {name: middle, f"{name}_q1": low, f"{name}_q3": high}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _known_sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _processor() -> str:
    """The processor's name as its maker writes it, where the system tells."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# ---- for a person


def all_ours_identical(records: Sequence[dict[str, Any]]) -> bool:
    """Whether every answer of ours was the target's, ties aside."""
    return all(row["identical"] + row["ties"] == row["num_answers"] for row in records if row["ours"])


def print_report(records: Sequence[dict[str, Any]]) -> None:
    """Print a table per part, what was skipped, and whether our answers were the target's."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    for part, title in (("domains", "One prompt at a time"), ("growth", "How the cost grows")):
        rows = [row for row in records if row["part"] == part and not row["skipped"]]
        if not rows:
            continue
        table = Table(title=title, box=box.SIMPLE_HEAD)
        for heading in _HEADINGS:
            words = heading in ("workload", "side")
            table.add_column(heading, justify="left" if words else "right", no_wrap=heading == "side")
        for before, row in zip([None, *rows], rows, strict=False):
            if before and _workload(before) != _workload(row):
                table.add_section()
            table.add_row(*_cells(row, first=before is None or _workload(before) != _workload(row)))
        console.print(table)
    for side, reason in sorted({(row["side"], row["skipped"]) for row in records if row["skipped"]}):
        console.print(f"skipped: {side}: {reason}", markup=False)
    about = records[0]
    packages = ", ".join(f"{name} {found}" for name, found in about["versions"].items())
    console.print(
        f"{about['machine']}, {about['cores']} cores, {about['threads']} threads, {about['device']}, {about['dtype']}; "
        f"{packages}; {about['command']}; {about['at']}",
        markup=False,
    )
    verify = ", ".join(_number(seconds, 0, 1e3) for seconds in about["cost_verify_seconds"])
    console.print(
        f"cost of a step, measured first: {about['cost_draft_seconds'] * 1e3:.0f} ms a drafted token; {verify} ms to "
        "verify chains of 0, 1, 2, … tokens"
    )
    print(_verdict(records))


_HEADINGS = (
    "workload",
    "side",
    "tokens/s",
    "quartiles",
    "of plain",
    "decoding/s",
    "first token s",
    "tokens/step",
    "draft %",
    "verify %",
    "rest %",
    "identical",
)


def _cells(row: dict[str, Any], *, first: bool) -> list[str]:
    ties = f" +{row['ties']} ties" if row["ties"] else ""
    return [
        _workload(row) if first else "",
        row["side"],
        _number(row["tokens_per_second"], 2),
        _quartiles(row),
        _number(row["ratio_to_plain"], 2),
        _number(row["decode_tokens_per_second"], 2),
        _number(row["time_to_first_token_seconds"], 2),
        _number(row["accepted_length"], 2),
        *(_number(row[f"{part}_share"], 0, 100) for part in ("draft", "verify", "other")),
        f"{row['identical']}/{row['num_answers']}{ties}",
    ]


def _quartiles(row: dict[str, Any]) -> str:
    if row["num_turns"] < 2:
        return "-"
    return f"{_number(row['tokens_per_second_q1'], 2)}-{_number(row['tokens_per_second_q3'], 2)}"


def _workload(row: dict[str, Any]) -> str:
    if row["part"] == "domains":
        return str(row["domain"])
    return f"batch {row['batch']}, prompt {row['prompt_tokens']}"


def _number(value: float | None, digits: int, scale: float = 1) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def _verdict(records: Sequence[dict[str, Any]]) -> str:
    rows = [row for row in records if row["ours"]]
    answers, ties = sum(row["num_answers"] for row in rows), sum(row["ties"] for row in rows)
    identical = sum(row["identical"] for row in rows)
    if all_ours_identical(records):
        return f"Of {answers} answers of ours {identical} are the target's own, token by token; {ties} part at a tie."
    return f"WARNING: only {identical} of {answers} answers of ours are the target's; run adaptive-spec check-lossless."
