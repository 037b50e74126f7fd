"""A simulation for a person: a table per domain and one for the mix, and what they rest on."""

import sys
from collections.abc import Sequence
from typing import Any

from adaptive_spec.bench.simulate_records import RecordedSimulation
from adaptive_spec.calibration.outcomes import DomainOutcome, Outcome
from adaptive_spec.calibration.simulate import BEST_FIXED, OFF, ORACLE, OURS

EXPLAINED = {
    OFF: "no speculation",
    "live thresholds": "ours: the live release's thresholds",
    "live stopping": "ours: optimal stopping on the live release's survival curve and this cost",
    "fresh thresholds": "ours: thresholds fitted to each domain's earlier requests",
    "fresh stopping": "ours: optimal stopping, fitted to each domain's earlier requests",
    "pooled thresholds": "one set of thresholds for all domains, fitted to the earlier requests",
    "transformers": "the dynamic confidence threshold of transformers' assisted generation",
    "logistic": "one logistic estimator for all domains that trims drafted chains, as in vLLM",
    BEST_FIXED: "the best fixed length of each domain, chosen in hindsight",
    ORACLE: "knows what will be accepted: with chains on record nobody can do better",
}
_FEW = 20  # requests; with fewer a bootstrap is too sure of itself
_HEADINGS = ("policy", "tokens/s", "of off", "95 %", "regret %", "95 %", "drafted", "emitted")


def print_report(found: RecordedSimulation) -> None:
    """Print it all."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    simulation = found.simulation
    if simulation.mix:
        shares = ", ".join(f"{part.domain} {part.traffic_share:.0%}" for part in simulation.domains)
        console.print(_table(f"the mix: {shares} of the tokens", simulation.mix))
    for part in simulation.domains:
        console.print(_table(part.domain, part.outcomes))
        console.print(basis(part), markup=False, highlight=False, soft_wrap=True)
    for line in [*_missing(found), *_foot(found)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def basis(part: DomainOutcome) -> str:
    """What a domain's figures rest on, in a sentence."""
    return (
        f"{part.domain}: judged on {part.num_steps} steps of {part.num_requests} later requests, learnt on "
        f"{part.num_earlier_steps} earlier steps; {part.num_explored_steps} steps explored at full length; of "
        f"{part.num_values} values {part.num_filled_values} were filled in, and {part.num_cut_short} chains ended "
        f"before length {part.longest_chain} with every token kept, so that what follows is drawn from like steps."
        + _cut(part)
    )


def _cut(part: DomainOutcome) -> str:
    """Where policies wanted longer chains than the records can judge."""
    shares = [f"{outcome.policy} {outcome.cut_share:.0%}" for outcome in part.outcomes if outcome.cut_share]
    if not shares:
        return ""
    return (
        f" No chain beyond {part.longest_chain} (of {part.longest_allowed}) can be judged: cut there in so many steps "
        f"are {', '.join(shares)}."
    )


def _table(title: str, outcomes: Sequence[Outcome]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "policy" else "right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(*_cells(outcome), style="bold" if outcome.policy in OURS else None)
    return table


def _cells(outcome: Outcome) -> list[str]:
    return [
        outcome.policy,
        _number(outcome.goodput, 2),
        _number(outcome.relative, 3),
        _range(outcome.low, outcome.high, 3),
        _number(outcome.regret, 1, 100),
        _range(outcome.regret_low, outcome.regret_high, 1, 100),
        _number(outcome.drafted_tokens, 2),
        _number(outcome.emitted_tokens, 2),
    ]


def _missing(found: RecordedSimulation) -> list[str]:
    """Why there are dashes, each reason once."""
    simulation = found.simulation
    lines = [f"not judged: domain {small.domain}: {small.reason}" for small in simulation.too_small]
    domains: dict[tuple[str, str], list[str]] = {}
    for part in simulation.domains:
        for outcome in part.outcomes:
            if outcome.reason:
                domains.setdefault((outcome.policy, outcome.reason), []).append(part.domain)
    return lines + [f"not judged: {name} in {', '.join(where)}: {why}" for (name, why), where in domains.items()]


def _foot(found: RecordedSimulation) -> list[str]:
    simulation, cost = found.simulation, found.simulation.cost
    verify = ", ".join(f"{seconds * 1e3:.0f}" for seconds in cost.verify_seconds)
    few = [part.domain for part in simulation.domains if part.num_requests < _FEW]
    return [
        *([f"fewer than {_FEW} requests, so intervals are too narrow: {', '.join(few)}"] if few else []),
        *(f"{name}: {text}" for name, text in EXPLAINED.items()),
        "regret: what is lost against 'best fixed'; below 0 beats it. drafted, emitted: tokens a step.",
        f"release {found.release}; the first {simulation.split:.0%} of the requests to learn, the rest to judge; "
        f"chains completed with {simulation.num_seeds} seeds; intervals by request",
        f"cost of a step of {simulation.rows} rows: {cost.draft_seconds * 1e3:.0f} ms a drafted token; {verify} ms to "
        f"verify chains of 0, 1, 2, … tokens; {cost.key}",
    ]


def _number(value: float | None, digits: int, scale: float = 1) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f}"


def _range(low: float | None, high: float | None, digits: int, scale: float = 1) -> str:
    return "-" if low is None else f"{_number(low, digits, scale)} to {_number(high, digits, scale)}"
