"""Simulations: what the sequential test promises, with a look after every request."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_spec.releases.sequential import log_capital, lower_bound, paired, upper_bound


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.floats(-0.9, 0.9))
def test_bounds_are_those_that_the_capital_draws(differences: list[float], mean: float) -> None:
    low, high = lower_bound(differences, 0.05), upper_bound(differences, 0.05)
    assert -1 <= low <= high <= 1
    rejected = log_capital(differences, mean) >= math.log(20)
    assert rejected == (mean <= low) or mean == pytest.approx(low, abs=1e-6)
    assert log_capital(differences, mean) == pytest.approx(log_capital(differences[::-1], mean), abs=1e-9)


def test_blocks_end_when_both_sides_have_spoken() -> None:
    requests = [(False, 0.2), (False, 0.4), (True, 0.9), (True, 0.5), (True, 0.7), (False, 0.6), (False, 1.0)]
    assert paired(requests) == pytest.approx([0.9 - 0.3, 0.6 - 0.6])
    assert paired(requests, [value / 2 for _, value in requests]) == pytest.approx([0.9 - 0.15, 0.6 - 0.3])
    assert paired([(True, 0.5)]) == []


@pytest.mark.parametrize("kind", ["beta", "coin", "skewed"])
def test_a_true_null_is_rejected_no_oftener_than_stated_at_any_look(kind: str) -> None:
    """Not one look but all of them: the largest capital of 300 pairs, in 400 simulated canaries."""
    rng = np.random.default_rng(1)
    draw = {
        "beta": lambda n: rng.beta(2, 6, n) - rng.beta(2, 6, n),
        "coin": lambda n: rng.integers(0, 2, n) - rng.integers(0, 2, n) * 1.0,
        "skewed": lambda n: (rng.random(n) < 0.02) - rng.beta(1, 49, n),
    }[kind]
    runs, level, ever = 400, 0.05, 0
    for _ in range(runs):
        differences = draw(300)
        assert abs(differences).max() <= 1
        ever += _highest(differences, 0.0) >= -math.log(level)
    assert ever / runs <= level + 2 * math.sqrt(level * (1 - level) / runs)


def test_a_planted_loss_is_found() -> None:
    rng = np.random.default_rng(2)
    found = [upper_bound((rng.beta(2, 7, 400) - rng.beta(2.6, 6.4, 400)).tolist(), 0.05 / 3) < 0 for _ in range(30)]
    assert np.mean(found) >= 0.9  # a quarter less, spread as widely as real requests are


def _highest(differences: "np.ndarray[tuple[int], np.dtype[np.float64]]", mean: float) -> float:
    """The largest log capital over all looks, by the definition: each stake's product, averaged at every step."""
    from adaptive_spec.releases import sequential

    capitals = np.log1p(np.outer(sequential._STAKES / (1 + mean), differences - mean)).cumsum(axis=1)
    assert log_capital(differences, mean) == pytest.approx(float(np.log(np.exp(capitals[:, -1]).mean())), abs=1e-6)
    return float(np.log(np.exp(capitals).mean(axis=0)).max())
