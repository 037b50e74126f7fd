"""The gate on made-up requests: what passes, what is refused, and by which check."""

from dataclasses import replace

import numpy as np
import pytest

from adaptive_spec.core import POOLED
from adaptive_spec.releases.gate import RARE, Served, gate
from adaptive_spec.releases.report import Check, GateReport

NOTHING = np.zeros(10)


def requests(
    gains: dict[str, float], count: int = 30, noise: float = 0.05, steps: float | None = None, seed: int = 0
) -> tuple[list[Served], list[Served]]:
    """Domains whose goodput gains such a share, and whose acceptance length gains as much, or ``steps``."""
    random = np.random.default_rng(seed)
    before = [
        Served(domain, f"{domain}-{i}", 100, 50, float(random.uniform(5, 15)), 40, NOTHING, 60)
        for domain in gains
        for i in range(count)
    ]

    def better(row: Served) -> Served:
        share = gains[row.domain] + float(random.normal(0, noise))
        longer = share if steps is None else steps + float(random.normal(0, noise))
        return replace(row, seconds=row.seconds / (1 + share), num_steps=row.num_steps / (1 + longer))  # type: ignore[arg-type]

    return before, [better(row) for row in before]


def verdicts(report: GateReport) -> dict[str, bool]:
    return {check.name: check.passed for check in report.checks}


def test_a_clear_gain_passes() -> None:
    before, after = requests({"code": 0.3, "legal": 0.1})
    report = gate(before, list(reversed(after)), 0.01)
    assert report.passed and report.reasons == []
    assert verdicts(report) == dict.fromkeys(("goodput", "domains", "calibration", "degenerate"), True)
    assert [row["domain"] for row in report.domains] == [POOLED, "code", "legal"]
    assert report.domains[1]["goodput_gain_share"] == pytest.approx(0.3, abs=0.05)
    assert report.checks[0].figures["claims"] == "speed"
    assert report.to_dict()["checks"][0]["figures"]["low"] > 0.1


def test_noise_does_not_pass() -> None:
    report = gate(*requests({"code": 0.0}, noise=0.3), 0.01)
    assert not report.passed and "no gain is certain" in report.reasons[0]


def test_an_unchanged_release_is_no_gain() -> None:
    before, _ = requests({"code": 0.0})
    assert not gate(before, before, 0.01).passed


def test_a_better_draft_where_speculation_does_not_pay() -> None:
    """Both releases decode without speculation: the same seconds, but the candidate agrees with the target more."""
    before, _ = requests({"code": 0.0})
    after = [replace(row, num_steps=40 + i % 5) for i, row in enumerate(before)]
    report = gate(before, after, 0.01)
    assert report.passed and report.checks[0].figures["claims"] == "acceptance length"
    slower = [replace(row, seconds=row.seconds * 1.05) for row in after]
    assert not verdicts(gate(before, slower, 0.01))["goodput"]


def test_one_losing_domain_refuses_a_pooled_gain() -> None:
    sides = requests({"code": 0.5, "legal": -0.1})
    report = gate(*sides, 0.01)
    assert verdicts(report) == {"goodput": True, "domains": False, "calibration": True, "degenerate": True}
    assert "legal loses goodput" in report.reasons[0] and len(report.reasons) == 1
    assert gate(*sides, 0.3).passed


def test_a_domain_that_forgets_is_refused_although_it_is_as_fast() -> None:
    before, after = requests({"code": 0.5, "legal": 0.0}, noise=0.0)
    after = [replace(row, num_steps=60 + i % 3) if row.domain == "legal" else row for i, row in enumerate(after)]
    assert "legal loses acceptance length" in gate(before, after, 0.01).reasons[0]


def test_what_few_requests_cannot_show_is_said() -> None:
    before, after = requests({"code": 0.5}, count=40)
    few_before, few_after = requests({"legal": 0.0}, count=6, noise=0.2, seed=3)
    report = gate(before + few_before, after + few_after, 0.01)
    domains = next(check for check in report.checks if check.name == "domains")
    assert domains.passed and domains.figures["unproven"] == ["legal"] and "cannot be ruled out" in domains.reason
    legal = next(row for row in report.domains if row["domain"] == "legal")
    assert legal["smallest_loss_seen_share"] > 0.03


def test_rare_domains_are_judged_together() -> None:
    before, after = requests({"code": 0.5}, count=60)
    rare = requests({f"rare-{i}": -0.2 for i in range(6)}, count=2)
    report = gate(before + rare[0], after + rare[1], 0.01)
    assert [row["domain"] for row in report.domains] == [POOLED, "code", RARE]
    assert f"{RARE} loses" in report.reasons[0]


def test_a_harmless_release_is_seldom_refused_for_a_domain() -> None:
    """Eight domains, none of which changes: refused for one of them in less than half of the cases stated."""
    refused = 0
    for seed in range(100):
        report = gate(*requests({f"d{i}": 0.0 for i in range(8)}, count=12, noise=0.06, seed=seed), 0.01)
        refused += not verdicts(report)["domains"]
    assert refused <= 40  # eight domains, two measures of each that move together, 5 % each at the edge of 1 %


def test_a_planted_loss_is_found() -> None:
    found = sum(
        not verdicts(gate(*requests({"a": 0.1, "b": -0.06}, count=30, noise=0.06, seed=seed), 0.01))["domains"]
        for seed in range(40)
    )
    assert found >= 36


def test_few_requests_and_nan_are_refused() -> None:
    assert not gate([], [], 0.01).passed
    assert "needed" in gate(*requests({"code": 1.0}, count=3), 0.01).reasons[0]
    before, after = requests({"code": 1.0})
    after[0] = replace(after[0], seconds=float("nan"))
    report = gate(before, after, 0.01)
    assert not report.passed and report.to_dict()["checks"][0]["figures"]["low"] is None
    with pytest.raises(ValueError, match="same requests"):
        gate(before, after[1:], 0.01)


def test_a_worse_calibration_is_refused_beyond_chance() -> None:
    random = np.random.default_rng(0)
    before, after = requests({"code": 0.3})

    def off(bias: float) -> list[Served]:
        return [replace(row, gaps=60 * bias + random.normal(0, 1.5, 10)) for row in after]

    known = [replace(row, gaps=random.normal(0, 1.5, 10)) for row in before]
    assert verdicts(gate(known, off(0.0), 0.01))["calibration"]
    worse = gate(known, off(0.02), 0.01)  # 2 % of the observations, in each of ten bins
    assert not verdicts(worse)["calibration"] and len(worse.reasons) == 1
    assert verdicts(gate(off(0.02), known, 0.01))["calibration"]


def test_degenerate_acceptance_trips_on_few_tokens() -> None:
    before, after = requests({"code": 0.5}, count=40)
    broken = (Served("x", "x", 100, 60, 10.0, 40, NOTHING, 60), Served("x", "x", 100, 100, 10.0, 1, NOTHING, 60))
    report = gate([*before, broken[0]], [*after, broken[1]], 0.5)
    assert not verdicts(report)["degenerate"] and "accepts 1.0%" in report.reasons[0]
    looping = [replace(row, num_agreeing=100, loops=True) for row in after]
    assert "end in loops" in gate(before, looping, 0.01).reasons[0]
    predictable = [replace(row, num_agreeing=100) for row in after]
    assert gate(before, predictable, 0.01).passed


def test_a_report_tells_of_every_check_in_json() -> None:
    report = gate(*requests({"code": 0.3}), 0.01).with_checks(
        [Check("integrity", False, "no file", {"x": float("inf")})]
    )
    told = report.to_dict()
    assert told["passed"] is False and told["reasons"] == ["integrity: no file"]
    assert told["checks"][0] == {"name": "integrity", "passed": False, "reason": "no file", "figures": {"x": None}}
    assert not GateReport(()).passed
