"""The comparison of length policies as flat records, and as tables for a person."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adaptive_spec.bench.compare import Cell
from adaptive_spec.bench.policies import (
    FIXED,
    LOGISTIC,
    OFF,
    OURS,
    POOLED_THRESHOLDS,
    SIDES,
    TRANSFORMERS,
    TRANSFORMERS_CAPPED,
    Policies,
)
from adaptive_spec.bench.policies_figures import Rates, Ratio, best_on_mix, mixed, rates, ratio, tokens_per_second

MIX = "mix"
BEST_FIXED = "best fixed"
EXPLAINED = {
    OFF: "no speculation; what every ratio is to",
    "fixed 1 … 4": "always that many tokens",
    TRANSFORMERS: "the dynamic confidence threshold of transformers' assisted generation, 20 tokens at most",
    TRANSFORMERS_CAPPED: "the same with our longest chain",
    LOGISTIC: "one logistic estimator for all domains that leaves drafted tokens unverified, as in vLLM",
    POOLED_THRESHOLDS: "the release's pooled thresholds for every domain",
    "threshold": "ours: the release's thresholds of each domain",
    "stopping": "ours: optimal stopping on the release's survival curve of each domain and the measured cost",
    BEST_FIXED: "the fixed length, 0 included, that turned out best on the mix, the same for all domains",
}
_FEW = 8  # prompts of a domain; with fewer a bootstrap is too sure of itself


def policy_records(found: Policies, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return records of two parts: each side by domain and on the mix, and ours against each other side.

    Args:
        about: what ran where; repeated in each.
    """
    shown = rates(found.cells)
    best = best_on_mix(shown, [side for side in (OFF, *FIXED) if side in shown], OFF)
    common = {
        **about,
        "best_fixed": FIXED.get(best, 0),
        "estimator_observations": found.num_observations,
        "estimator_depth": found.verification.depth if found.verification else None,
        "skipped": found.skipped,
    }
    rows = [*_sides(found.cells, shown), *_contests(shown, best)]
    return [{**row, **common} for row in rows]


def _sides(cells: Sequence[Cell], shown: Rates) -> Iterator[dict[str, Any]]:
    for side in shown:
        own = [cell for cell in cells if cell.side == side]
        yield _row(side, MIX, own, mixed(shown[side], shown[OFF]), tokens_per_second(shown[side].values()))
        for cell in own:
            domain = cell.workload.domain
            its = ratio(shown[side][domain], shown[OFF][domain])
            yield _row(side, domain, [cell], its, tokens_per_second([shown[side][domain]]))


def _row(side: str, domain: str, cells: Sequence[Cell], to_off: Ratio, rate: float) -> dict[str, Any]:
    turns = [turn for cell in cells for turn in cell.turns]
    num_rows = sum(len(turn.tokens) for turn in turns)  # each took one step for its prompt
    steps = sum(turn.num_row_steps for turn in turns) - num_rows
    emitted = sum(turn.num_tokens for turn in turns) - num_rows
    return {
        "part": "side",
        "side": side,
        "ours": side in OURS,
        "domain": domain,
        "batch": cells[0].workload.batch,
        "num_prompts": sum(len(task.prompts) for cell in cells for task in cell.workload.tasks),
        "max_tokens": cells[0].workload.tasks[0].max_tokens,
        "num_turns": len(turns),
        "tokens_per_second": rate,
        "ratio_to_off": to_off.value,
        "ratio_to_off_low": to_off.low,
        "ratio_to_off_high": to_off.high,
        "mean_chain_length": sum(turn.num_draft_tokens for turn in turns) / steps if steps else None,
        "tokens_per_step": emitted / steps if steps else None,
        "num_answers": num_rows,
        "identical": sum(cell.num_identical for cell in cells),
        "ties": sum(cell.num_ties for cell in cells),
    }


def _contests(shown: Rates, best: str) -> Iterator[dict[str, Any]]:
    """Ours against each other side that ran; the fixed lengths by the best of them."""
    others = {BEST_FIXED: best} | {name: name for name in SIDES if name in shown and name not in (OFF, *FIXED, *OURS)}
    for ours in OURS:
        for against, side in others.items():
            mine, theirs = shown[ours], shown[side]
            yield _contest(ours, against, MIX, mixed(mine, theirs))
            for domain in mine:
                yield _contest(ours, against, domain, ratio(mine[domain], theirs[domain]))


def _contest(ours: str, against: str, domain: str, its: Ratio) -> dict[str, Any]:
    figures = {"ratio": its.value, "ratio_low": its.low, "ratio_high": its.high}
    return {"part": "contest", "side": ours, "against": against, "domain": domain, **figures, "slower": its.is_slower}


# ---- for a person


def all_identical(records: Sequence[dict[str, Any]]) -> bool:
    """Whether every answer was plain decoding's, ties aside."""
    rows = [row for row in records if row["part"] == "side"]
    return all(row["identical"] + row["ties"] == row["num_answers"] for row in rows)


def print_report(records: Sequence[dict[str, Any]]) -> None:
    """Print a table for the mix and for each domain, ours against the others, and what it rests on."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 140)
    sides = [row for row in records if row["part"] == "side"]
    domains = list(dict.fromkeys(row["domain"] for row in sides))
    for domain in domains:
        console.print(_side_table(domain, [row for row in sides if row["domain"] == domain]))
    console.print(_contest_table(domains, [row for row in records if row["part"] == "contest"]))
    for line in _foot(records):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _side_table(domain: str, rows: Sequence[dict[str, Any]]) -> Any:
    title = "the mix: the same tokens of each domain" if domain == MIX else domain
    table = _table(title, ("policy", "tokens/s", "of off", "95 %", "chain", "tokens/step", "identical"), 1)
    for row in rows:
        ties = f" +{row['ties']} ties" if row["ties"] else ""
        table.add_row(
            row["side"],
            f"{row['tokens_per_second']:.2f}",
            f"{row['ratio_to_off']:.3f}",
            _range(row["ratio_to_off_low"], row["ratio_to_off_high"], 3) or "-",
            _number(row["mean_chain_length"]),
            _number(row["tokens_per_step"]),
            f"{row['identical']}/{row['num_answers']}{ties}",
            style="bold" if row["ours"] else None,
        )
    return table


def _contest_table(domains: Sequence[str], rows: Sequence[dict[str, Any]]) -> Any:
    table = _table("ours against the others: times as fast, 95 % interval", ("ours", "against", *domains), 2)
    for before, row in zip([None, *rows], rows, strict=False):
        if row["domain"] != MIX:
            continue
        if before and before["side"] != row["side"]:
            table.add_section()
        same = {r["domain"]: r for r in rows if (r["side"], r["against"]) == (row["side"], row["against"])}
        table.add_row(row["side"], row["against"], *(_ratio(same[domain]) for domain in domains))
    return table


def _table(title: str, headings: Sequence[str], num_words: int) -> Any:
    """A table whose first so many columns hold words."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place < num_words else "right", no_wrap=place < num_words)
    return table


def _ratio(row: Mapping[str, Any]) -> str:
    interval = _range(row["ratio_low"], row["ratio_high"], 2)
    mark = " slower" if row["slower"] else ""
    return f"{row['ratio']:.2f} ({interval}){mark}" if interval else f"{row['ratio']:.2f}"


def _range(low: float | None, high: float | None, digits: int) -> str:
    return "" if low is None or high is None else f"{low:.{digits}f}-{high:.{digits}f}"


def _foot(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    about = records[0]
    for name, text in EXPLAINED.items():
        yield f"{name}: {text}" + (f"; here {about['best_fixed']}" if name == BEST_FIXED else "")
    for side, reason in about["skipped"].items():
        yield f"left out: {side}: {reason}"
    if about["estimator_depth"] is not None:
        yield (
            f"the estimator learnt from {about['estimator_observations']} reached positions of earlier traffic; tokens "
            f"that it drafts in every step: {about['estimator_depth']}; chain: those verified"
        )
    rows = [row for row in records if row["part"] == "side"]
    if few := [row["domain"] for row in rows if row["side"] == OFF and row["num_prompts"] < _FEW]:
        yield f"fewer than {_FEW} prompts, so intervals are too narrow: {', '.join(few)}"
    yield "of off: median of the ratios by turn, after the first token; intervals draw prompts, then rounds of each"
    draft, *verify = (f"{s * 1e3:.0f}" for s in (about["cost_draft_seconds"], *about["cost_verify_seconds"]))
    yield (
        f"cost of a step, batch {about['batch']}, measured first: {draft} ms a drafted token; {', '.join(verify)} ms "
        "to verify chains of 0, 1, 2, … tokens"
    )
    packages = ", ".join(f"{name} {found}" for name, found in about["versions"].items())
    yield (
        f"{about['machine']}, {about['cores']} cores, {about['threads']} threads, {about['device']}, {about['dtype']}; "
        f"{packages}; {about['command']}; {about['at']}"
    )
    yield _verdict(records)


def _verdict(records: Sequence[dict[str, Any]]) -> str:
    rows = [row for row in records if row["part"] == "side" and row["domain"] == MIX and row["side"] != OFF]
    answers, identical, ties = (sum(row[name] for row in rows) for name in ("num_answers", "identical", "ties"))
    if all_identical(records):
        return f"Of {answers} answers {identical} are plain decoding's, token by token; {ties} part at a tie."
    return f"WARNING: only {identical} of {answers} answers are plain decoding's; run adaptive-spec check-lossless."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
