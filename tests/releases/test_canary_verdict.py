"""Canaries of simulated traffic: promoted, rolled back, and neither without reason."""

import numpy as np
import pytest

from adaptive_spec.core import POOLED
from adaptive_spec.releases.canary import MIN_PAIRS, REFERENCE_REQUESTS, Reading, Terms, judge

TERMS = Terms(longest_chain=6, margin_share=0.05, level=0.05)


def traffic(
    rng: np.random.Generator, count: int, gain: dict[str, float], share: float = 0.2, hour: bool = False
) -> list[Reading]:
    """Requests of two domains; a canary's accepted tokens are multiplied.  Goodput follows them, with noise."""
    found = []
    for index in range(count):
        domain = ("code", "prose")[int(rng.random() < 0.3)]
        canary = bool(rng.random() < share)
        usual = {"code": 1.2, "prose": 0.7}[domain] * (1 + 0.5 * np.sin(index / 40) if hour else 1)
        accepted = min(6.0, usual * rng.gamma(6, 1 / 6) * (gain[domain] if canary else 1))
        goodput = 30 * (1 + accepted) * float(rng.lognormal(0, 0.2))
        found.append(Reading(domain, canary, accepted, goodput))
    return found


def first_decision(readings: list[Reading], every: int = 200) -> tuple[str, int]:
    """Look again and again; return the first decision and the canary's requests until then."""
    for count in range(every, len(readings) + 1, every):
        verdict = judge(readings[:count], TERMS)
        if verdict.decision != "go_on":
            return verdict.decision, verdict.num_canary_requests
    return "go_on", sum(reading.canary for reading in readings)


@pytest.mark.parametrize("hour", [False, True])
def test_an_equal_canary_is_rarely_rolled_back(hour: bool) -> None:
    rng = np.random.default_rng(3)
    same = {"code": 1.0, "prose": 1.0}
    decisions = [first_decision(traffic(rng, 400, same, hour=hour))[0] for _ in range(20)]
    assert decisions.count("roll_back") <= 3  # at exactly 5 % more than 3 would come in 1.6 % of all samples


def test_a_worse_canary_is_rolled_back_and_never_promoted() -> None:
    rng = np.random.default_rng(4)
    decisions = [first_decision(traffic(rng, 1200, {"code": 0.7, "prose": 0.7}), every=200)[0] for _ in range(6)]
    assert decisions.count("roll_back") >= 5 and "promote" not in decisions


def test_a_better_canary_is_promoted() -> None:
    rng = np.random.default_rng(5)
    found = [first_decision(traffic(rng, 1500, {"code": 1.3, "prose": 1.3}), every=300) for _ in range(6)]
    assert [decision for decision, _ in found].count("promote") >= 5
    assert min(count for _, count in found) >= MIN_PAIRS


def test_a_domain_that_loses_ends_a_canary_that_gains_over_all() -> None:
    rng = np.random.default_rng(6)
    verdict = judge(traffic(rng, 2500, {"code": 1.3, "prose": 0.3}, share=0.4), TERMS)
    assert verdict.decision == "roll_back" and "'prose'" in verdict.reason
    pooled = {one.number: one for one in verdict.comparisons if one.domain == POOLED}
    assert all(one.low <= one.high for one in verdict.comparisons) and len(pooled) == 2


def test_the_first_requests_say_what_goodput_is_usual() -> None:
    rng = np.random.default_rng(7)
    few = traffic(rng, REFERENCE_REQUESTS, {"code": 1.0, "prose": 1.0})
    assert {one.number for one in judge(few, TERMS).comparisons} == {"accepted_tokens_per_step"}
    assert judge([], TERMS).decision == "go_on"
