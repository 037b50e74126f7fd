"""The demo's report: figures worked out by hand, a table that tells the truth, a picture that can be drawn."""

from pathlib import Path
from typing import Any

import pytest

from adaptive_spec.bench.corpora import DOMAINS, Prompt
from adaptive_spec.bench.demo_report import Answer, Findings, build_report, draw, print_table

THRESHOLDS = {"thresholds": {"math": {"max_chain_length": 2}}, "fallback": {"max_chain_length": 0}}


def answer(domain: str, name: str, accepted: int, *, steps: int = 10, release: int = 0, text: str = "x") -> Answer:
    return Answer(Prompt(name, domain, "?"), text, 20, steps, 2 * steps, accepted, (release,), 4.0, 100.0)


def findings(**changes: Any) -> Findings:
    before = [answer(domain, f"{domain}-{i}", accepted=1) for domain in DOMAINS for i in range(6)]
    after = [answer(domain, f"{domain}-{i}", accepted=5, release=1) for domain in DOMAINS for i in range(6)]
    speed = [answer(domain, f"{domain}-0", accepted=0) for domain in DOMAINS]
    traffic = [answer("code", "code-9", accepted=2)]
    values = {
        "before": before,
        "after": after,
        "speed_before": {None: speed},
        "speed_after": {None: speed, 0: speed},
        "timeline": [*before, *traffic, *after],
        "run": {"release": 1, "report": {"passed": True}},
        "thresholds": THRESHOLDS,
        "chain_length": 2,
        "seed": 0,
    }
    return Findings(**{**values, **changes})


def test_the_figures_of_a_domain() -> None:
    report = build_report(findings())
    assert [row["domain"] for row in report["domains"]] == list(DOMAINS)
    row = report["domains"][DOMAINS.index("math")]
    assert row["num_prompts"] == 6
    assert row["acceptance_length_before"] == pytest.approx(1.1)
    assert row["acceptance_length_after"] == pytest.approx(1.5)
    assert row["gain_interval"] == pytest.approx([0.4, 0.4])
    assert row["draft_acceptance_rate_before"] == pytest.approx(1 / 20)
    assert row["draft_acceptance_rate_after"] == pytest.approx(5 / 20)
    assert row["tokens_per_second_target_alone"] == pytest.approx(5.0)
    assert row["policy_max_chain_length"] == 2
    assert report["domains"][0]["policy_max_chain_length"] == 0
    assert report["num_traffic_requests"] == 1
    assert len(report["timeline"]) == 49


def test_plain_requests_are_not_points_of_the_picture(tmp_path: Path) -> None:
    plain = Answer(Prompt("p", "code", "?"), "x", 20, 20, 0, 0, (0,), 4.0, 100.0)
    report = build_report(findings(timeline=[plain]))
    assert report["timeline"] == []
    draw(build_report(findings()), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_says_where_it_does_not_pay_and_whether_outputs_changed(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(build_report(findings()))
    told = capsys.readouterr().out
    assert "does not pay for code, sql, tools" in told and "identical" in told
    changed = [answer("code", f"code-{i}", accepted=5, release=1, text="y") for i in range(6)]
    kept = [a for a in findings().after if a.prompt.domain != "code"]
    print_table(build_report(findings(after=[*changed, *kept])))
    assert "WARNING" in capsys.readouterr().out
