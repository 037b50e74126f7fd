"""What the demo found: the report, its table and its picture."""

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from adaptive_spec.bench.corpora import DOMAINS, Prompt
from adaptive_spec.releases.paired import GainInterval, TraceScore, paired_gain

_SMOOTHED = 10  # requests


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request showed."""

    prompt: Prompt
    text: str
    tokens: int
    steps: int
    proposed: int
    accepted: int
    releases: tuple[int, ...]
    seconds: float
    finished: float

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / max(1, self.steps)


@dataclass(frozen=True, slots=True)
class Findings:
    """All that was measured.  ``before`` and ``after`` are the same held-out prompts at one fixed chain length; the
    speeds are keyed by chain length, None for the policy's choice."""

    before: list[Answer]
    after: list[Answer]
    speed_before: Mapping[int | None, list[Answer]]
    speed_after: Mapping[int | None, list[Answer]]
    timeline: list[Answer]
    run: dict[str, Any]
    thresholds: dict[str, Any]
    chain_length: int
    seed: int


def build_report(found: Findings) -> dict[str, Any]:
    """Return what ``report.json`` holds."""
    texts = {answer.prompt.id: answer.text for answer in found.before}
    gains = paired_gain(_scores(found.before), _scores(found.after), found.seed)
    return {
        "domains": [_domain_row(domain, gains[domain], found) for domain in DOMAINS if domain in gains],
        "chain_length": found.chain_length,
        "num_traffic_requests": len(found.timeline) - len(found.before) - len(found.after),
        "outputs_changed_by_release": [a.prompt.id for a in found.after if texts[a.prompt.id] != a.text],
        "release": found.run["release"],
        "gate": found.run.get("report"),
        "thresholds": found.thresholds,
        "timeline": [
            {"domain": a.prompt.domain, "acceptance_length": a.acceptance_length, "releases": a.releases}
            for a in found.timeline
            if a.proposed
        ],
        "versions": {name: version(name) for name in ("adaptive-spec", "torch", "transformers", "peft")},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": found.seed,
    }


def _domain_row(domain: str, gain: GainInterval, found: Findings) -> dict[str, Any]:
    before, after = _of(domain, found.before), _of(domain, found.after)
    policy_before = _of(domain, found.speed_before[None])
    policy_after, alone = _of(domain, found.speed_after[None]), _of(domain, found.speed_after[0])
    return {
        "domain": domain,
        "num_prompts": gain.n,
        "acceptance_length_before": gain.before,
        "acceptance_length_after": gain.after,
        "gain_interval": [gain.low, gain.high],
        "draft_acceptance_rate_before": _rate(before),
        "draft_acceptance_rate_after": _rate(after),
        "tokens_per_second_before": _tokens_per_second(policy_before),
        "tokens_per_second_after": _tokens_per_second(policy_after),
        "tokens_per_second_target_alone": _tokens_per_second(alone),
        "policy_max_chain_length": _policy_limit(domain, found.thresholds),
    }


def _of(domain: str, answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.prompt.domain == domain]


def _scores(answers: Sequence[Answer]) -> list[TraceScore]:
    return [TraceScore(a.prompt.domain, a.prompt.id, _rate([a]), _rate([a]), a.acceptance_length) for a in answers]


def _rate(answers: Sequence[Answer]) -> float:
    return sum(a.accepted for a in answers) / max(1, sum(a.proposed for a in answers))


def _policy_limit(domain: str, thresholds: dict[str, Any]) -> int:
    own: dict[str, Any] = thresholds["thresholds"].get(domain) or thresholds["fallback"]
    return int(own["max_chain_length"])


def _tokens_per_second(answers: Sequence[Answer]) -> float:
    return statistics.median(a.tokens / a.seconds for a in answers)


def print_table(report: dict[str, Any]) -> None:
    """Print before against after, and say plainly where speculation does not pay here."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Held-out prompts, chains of {report['chain_length']}: release 0 against {report['release']}")
    for heading in (
        "domain",
        "prompts",
        "tokens/step before",
        "after",
        "gain, 95 % interval",
        "tokens/s before",
        "after",
        "target alone",
        "policy's longest chain",
    ):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    for row in report["domains"]:
        gain = row["acceptance_length_after"] - row["acceptance_length_before"]
        low, high = row["gain_interval"]
        table.add_row(
            row["domain"],
            str(row["num_prompts"]),
            f"{row['acceptance_length_before']:.2f}",
            f"{row['acceptance_length_after']:.2f}",
            f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]",
            f"{row['tokens_per_second_before']:.1f}",
            f"{row['tokens_per_second_after']:.1f}",
            f"{row['tokens_per_second_target_alone']:.1f}",
            str(row["policy_max_chain_length"]),
        )
    Console(width=140).print(table)
    plain = [row["domain"] for row in report["domains"] if row["policy_max_chain_length"] == 0]
    if plain:
        print(
            f"On this machine speculation does not pay for {', '.join(plain)}: the policy chose chain length 0 there, "
            "but for the share of steps that explores. On a CPU a verification of several tokens costs well over one "
            "plain step; see README, 'What to expect'."
        )
    if report["outputs_changed_by_release"]:
        print(f"WARNING: outputs changed for {report['outputs_changed_by_release']}; run adaptive-spec check-lossless.")
    else:
        print(
            "Every held-out answer is identical before and after the release: the draft decides speed, never content."
        )


def draw(report: dict[str, Any], path: Path) -> None:
    """Acceptance over requests, one line per domain, a marker where the release went live."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timeline = report["timeline"]
    switched = next((i for i, row in enumerate(timeline) if report["release"] in row["releases"]), len(timeline))
    figure, axes = pyplot.subplots(figsize=(9, 4.5), dpi=120)
    for number, domain in enumerate(DOMAINS):
        colour = f"C{number}"
        for part in (range(switched), range(switched, len(timeline))):
            places = [i for i in part if timeline[i]["domain"] == domain]
            values = [timeline[i]["acceptance_length"] for i in places]
            smooth = [float(np.mean(values[max(0, i - _SMOOTHED + 1) : i + 1])) for i in range(len(values))]
            axes.plot(places, smooth, color=colour, label=domain if part.start == 0 else None)
            axes.plot(places, values, ".", markersize=3, alpha=0.35, color=colour)
    axes.axvline(switched - 0.5, color="black", linestyle="--", linewidth=1)
    axes.annotate(f"release {report['release']}", (switched, axes.get_ylim()[1]), ha="left", va="top")
    axes.set_xlabel("speculating request")
    axes.set_ylabel(f"tokens per step (chains of {report['chain_length']})")
    axes.set_title(f"Acceptance over requests: each request, and the mean of the last {_SMOOTHED} of its domain")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
