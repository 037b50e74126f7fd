"""The gate on made-up scores."""

from dataclasses import replace

import numpy as np
import pytest

from adaptive_spec.core import POOLED
from adaptive_spec.releases.gate import TraceScore, gate, paired_gain


def scores(gains: dict[str, float], count: int = 30, noise: float = 0.1) -> tuple[list[TraceScore], list[TraceScore]]:
    generator = np.random.default_rng(0)
    before = [
        TraceScore(domain, f"{domain}-{i}", 0.5, 0.6, float(2 + generator.normal(0, 1)))
        for domain in gains
        for i in range(count)
    ]
    after = [
        replace(row, acceptance_length=row.acceptance_length + gains[row.domain] + float(generator.normal(0, noise)))
        for row in before
    ]
    return before, after


def test_a_clear_gain_passes() -> None:
    before, after = scores({"code": 0.5, "legal": 0.2})
    report = gate(before, list(reversed(after)), 0.01)
    assert report.passed and report.reasons == []
    assert [row["domain"] for row in report.domains] == [POOLED, "code", "legal"]
    assert report.to_dict()["domains"][1]["gain"] == pytest.approx(0.5, abs=0.1)


def test_noise_does_not_pass() -> None:
    report = gate(*scores({"code": 0.0}, noise=1.0), 0.01)
    assert not report.passed and "not certain" in report.reasons[0]


def test_one_losing_domain_refuses_a_pooled_gain() -> None:
    report = gate(*scores({"code": 1.0, "legal": -0.2}), 0.01)
    assert not report.passed and "'legal' loses" in report.reasons[0] and len(report.reasons) == 1
    assert gate(*scores({"code": 1.0, "legal": -0.2}), 0.3).passed


def test_few_requests_and_nan_are_refused() -> None:
    assert not gate([], [], 0.01).passed
    assert "needs" in gate(*scores({"code": 1.0}, count=3), 0.01).reasons[0]
    before, after = scores({"code": 1.0})
    after[0] = replace(after[0], acceptance_length=float("nan"))
    assert not gate(before, after, 0.01).passed


def test_an_unchanged_draft_passes() -> None:
    before, _ = scores({"code": 0.0})
    assert gate(before, before, 0.0).passed


def test_the_interval_covers_and_pairs() -> None:
    before, after = scores({"code": 0.3}, count=200, noise=0.5)
    row = paired_gain(before, after, 1)["code"]
    assert row.low < 0.3 < row.high and row.high - row.low < 0.2 and row.n == 200
    assert paired_gain(before, after, 1) == paired_gain(before, after, 1)
    for bad in (after[1:], [*after, after[0]]):
        with pytest.raises(ValueError, match="same requests"):
            paired_gain(before, bad)
