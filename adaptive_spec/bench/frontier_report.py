"""What the frontier found: flat records, and the tables for a person."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from adaptive_spec.bench.frontier import Frontier, FrontierPlan
from adaptive_spec.bench.frontier_live import Live
from adaptive_spec.bench.frontier_replay import Point, best_within, frontier
from adaptive_spec.bench.tasks import interval

BUDGETS = (0.0, 0.005, 0.01, 0.02, 0.05)


def frontier_records(found: Frontier, plan: FrontierPlan, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one flat record per figure; ``about`` is repeated in each.

    part: ``best`` (the fastest of a verifier within a share of divergence, ``budget``), ``frontier`` (the points of a
    verifier's curve) or ``live``.
    """
    sizes = {
        "num_prompts": plan.num_prompts,
        "max_tokens": plan.max_tokens,
        "batch": plan.batch,
        "timed_prompts": plan.timed_prompts,
        "notes": found.notes,
    }
    return [{**figures, **sizes, **about} for figures in _figures(found)]


def _figures(found: Frontier) -> Iterator[dict[str, Any]]:
    for domain, by_verifier in found.points.items():
        chains = len(found.recorded.recordings[domain])
        for verifier, points in by_verifier.items():
            for budget in BUDGETS:
                best = best_within(points, budget)
                shown = _point(best) if best else {"verifier": verifier}
                yield {"part": "best", "domain": domain, "budget": budget, "num_chains": chains, **shown}
            for point in frontier(points):
                yield {"part": "frontier", "domain": domain, "num_chains": chains, **_point(point)}
    plain = {live.domain: live.tokens_per_second for live in found.live if live.point is None}
    for live in found.live:
        yield _live(live, plain[live.domain])


def _point(point: Point) -> dict[str, Any]:
    return {
        "verifier": point.rule.verifier,
        "thresholds": point.rule.numbers,
        "chain_length": point.chain_length,
        "speed": point.speed,
        "tokens_per_step": point.tokens_per_step,
        "divergence_share": point.divergence_share,
        "num_divergent": point.num_divergent,
        "total_variation": point.total_variation,
        "given_up_nats": point.given_up_nats,
    }


def _live(live: Live, plain: float | None) -> dict[str, Any]:
    predicted = _point(live.point) if live.point else {"verifier": "plain", "thresholds": {}, "chain_length": 0}
    speed = live.tokens_per_second / plain if live.tokens_per_second and plain else None
    record = {
        "part": "live",
        "domain": live.domain,
        **predicted,
        "live_tokens_per_second": live.tokens_per_second,
        "live_speed": speed,
        "live_num_tokens": live.num_tokens,
        "live_tokens_per_step": live.tokens_per_step,
        "live_divergence_share": live.divergence_share,
        "live_num_divergent": live.num_divergent,
        "live_num_emitted": live.num_emitted,
        "mean_log_prob_nats": live.mean_log_prob_nats,
    }
    for name, its in live.tasks.items():
        low, high = interval(its.num_right, its.num_cases)
        record |= {
            "task_set": name,
            "num_right": its.num_right,
            "num_cases": its.num_cases,
            "share_right_low": low,
            "share_right_high": high,
            "task_divergence_share": its.num_divergent / its.num_emitted if its.num_emitted else None,
        }
    return record


# ---- for a person


def print_frontier(records: Sequence[dict[str, Any]]) -> None:
    """Print the best speeds, the points that were decoded, and what ran where."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    for title, headings, rows in (
        ("Fastest within a share of divergence (predicted; × plain decoding)", *best_table(records)),
        ("Decoded for real, beside what was predicted", *live_table(records)),
    ):
        if not rows:
            continue
        table = Table(title=title, box=box.SIMPLE_HEAD)
        for heading in headings:
            table.add_column(heading, justify="left" if heading in _WORDS else "right")
        domain = None
        for row in rows:
            if domain not in (None, row[0]):
                table.add_section()
            table.add_row("" if row[0] == domain else row[0], *row[1:-1], row[-1].replace("; ", "\n"))
            domain = row[0]
        console.print(table)
    about = records[0]
    chains = {row["domain"]: row["num_chains"] for row in records if "num_chains" in row}
    console.print("recorded chains: " + ", ".join(f"{domain} {count}" for domain, count in chains.items()))
    for note in about["notes"]:
        console.print(f"left out: {note}", markup=False)
    packages = ", ".join(f"{name} {found}" for name, found in about["versions"].items())
    console.print(
        f"{about['machine']}, {about['cores']} cores, {about['threads']} threads, {about['device']}, {about['dtype']}; "
        f"{packages}; {about['command']}; {about['at']}",
        markup=False,
    )


_WORDS = ("domain", "verifier", "thresholds")


def best_table(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: per domain and verifier the best speeds, and the thresholds that give them."""
    found: dict[tuple[str, str], dict[float, dict[str, Any]]] = {}
    for row in records:
        if row["part"] == "best":
            found.setdefault((row["domain"], row["verifier"]), {})[row["budget"]] = row
    loosest = BUDGETS[-1]
    headings = ["domain", "verifier", *(f"≤ {100 * budget:g} %" for budget in BUDGETS)]
    headings += [f"nats at {100 * loosest:g} %", "thresholds"]
    shown = [
        [
            domain,
            verifier,
            *(_number(by_budget[budget].get("speed")) for budget in BUDGETS),
            _number(by_budget[loosest]["given_up_nats"] if by_budget[loosest].get("num_divergent") else None, 1),
            _steps(by_budget),
        ]
        for (domain, verifier), by_budget in found.items()
    ]
    return headings, shown


def _steps(by_budget: dict[float, dict[str, Any]]) -> str:
    """The thresholds of each budget, told once where several share them."""
    parts: dict[str, list[str]] = {}
    for budget, row in by_budget.items():
        if "thresholds" in row:
            parts.setdefault(_thresholds(row), []).append(f"{100 * budget:g}")
    if len(parts) == 1:
        return next(iter(parts))
    return "; ".join(f"{', '.join(budgets)} %: {text}" for text, budgets in parts.items())


_SHORT = {
    "ngram_size": "{}-gram",
    "min_overlap": "overlap {:g}",
    "similarity": "{}",
    "min_similarity": "≥ {:g}",
    "typical_epsilon": "ε {:g}",
    "typical_delta": "δ {:g}",
    "relaxed_top_k": "top {}",
    "relaxed_delta": "δ {:g}",
}


def _thresholds(row: dict[str, Any]) -> str:
    texts = [_SHORT[name].format(value) for name, value in row["thresholds"].items()]
    return " ".join([*texts, f"chain {row['chain_length']}"])


def live_table(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the points that were decoded."""
    rows = [row for row in records if row["part"] == "live"]
    headings = ["domain", "verifier", "thresholds", "tokens/step", "predicted", "divergence %", "predicted %"]
    headings += ["tokens/s", "× plain", "predicted", "log-prob", "right", "95 % interval"]
    return headings, [
        [
            row["domain"],
            row["verifier"],
            _thresholds(row) if row["chain_length"] else "-",
            _number(row["live_tokens_per_step"]),
            _number(row.get("tokens_per_step")),
            _number(row["live_divergence_share"], 1, 100),
            _number(row.get("divergence_share"), 1, 100),
            _number(row["live_tokens_per_second"], 1),
            _number(row["live_speed"]),
            _number(row.get("speed")),
            _number(row["mean_log_prob_nats"]),
            f"{row['task_set']} {row['num_right']}/{row['num_cases']}" if "task_set" in row else "-",
            f"{100 * row['share_right_low']:.0f}-{100 * row['share_right_high']:.0f} %" if "task_set" in row else "-",
        ]
        for row in rows
    ]


def _number(value: float | None, digits: int = 2, scale: float = 1) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"
