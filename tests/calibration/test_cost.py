"""Costs: outliers ignored, verification monotone, nonsense refused."""

import itertools

import pytest

from adaptive_spec.calibration.cost import cost_key, measure_cost


def test_medians_without_warm_up_and_outliers() -> None:
    draft = itertools.chain([9.0], itertools.cycle([0.010, 0.011, 0.010, 5.0, 0.012]))
    cost = measure_cost(lambda: next(draft), lambda length: 0.02 + 0.001 * length, 3, "here")
    assert cost.draft_seconds == pytest.approx(0.0105, abs=0.0005)
    assert cost.verify_seconds == pytest.approx((0.02, 0.021, 0.022, 0.023))
    assert cost.key == "here"


def test_verification_never_gets_cheaper_with_length() -> None:
    noisy = [0.020, 0.030, 0.022, 0.026]
    cost = measure_cost(lambda: 0.01, lambda length: noisy[length], 3, "here")
    assert list(cost.verify_seconds) == sorted(cost.verify_seconds)
    assert cost.verify_seconds == pytest.approx((0.020, 0.026, 0.026, 0.026))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_broken_timer_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        measure_cost(lambda: bad, lambda length: 0.01, 2, "here")
    with pytest.raises(ValueError, match="repeats"):
        measure_cost(lambda: 0.01, lambda length: 0.01, 2, "here", repeats=0)


def test_key_names_everything_that_changes_the_cost() -> None:
    given = {"target": "a", "draft": "b", "dtype": "float32", "device": "cpu"}
    key = cost_key(**given, threads=2, batch_size=4, hardware="box")
    assert key == "box|cpu|a|b|float32|threads=2|batch=4"
    assert cost_key(**given, threads=2, batch_size=8) != cost_key(**given, threads=2, batch_size=4)
