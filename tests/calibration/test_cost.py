"""Costs: outliers ignored, verification monotone, nonsense refused."""

import itertools

import pytest

from adaptive_spec.calibration.cost import cost_key, measure_cost


def test_medians_without_warm_up_and_outliers() -> None:
    draft = itertools.chain([9.0], itertools.cycle([0.010, 0.011, 0.010, 5.0, 0.012]))
    cost = measure_cost(lambda rows: next(draft), lambda tokens: 0.019 + 0.001 * tokens, 3, "here").step
    assert cost.draft_seconds == pytest.approx(0.0105, abs=0.0005)
    assert cost.verify_seconds == pytest.approx((0.02, 0.021, 0.022, 0.023))
    assert cost.key == "here"


def test_verification_never_gets_cheaper_with_length() -> None:
    noisy = [0.020, 0.030, 0.022, 0.026]
    cost = measure_cost(lambda rows: 0.01, lambda tokens: noisy[tokens - 1], 3, "here").step
    assert list(cost.verify_seconds) == sorted(cost.verify_seconds)
    assert cost.verify_seconds == pytest.approx((0.020, 0.026, 0.026, 0.026))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_broken_timer_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        measure_cost(lambda rows: bad, lambda tokens: 0.01, 2, "here")
    with pytest.raises(ValueError, match="repeats"):
        measure_cost(lambda rows: 0.01, lambda tokens: 0.01, 2, "here", repeats=0)


def test_key_names_everything_that_changes_the_cost() -> None:
    given = {"target": "a", "draft": "b", "dtype": "float32", "device": "cpu"}
    key = cost_key(**given, threads=2, batch_size=4, hardware="box")
    assert key == "box|cpu|a|b|float32|threads=2|batch=4"
    assert cost_key(**given, threads=2, batch_size=8) != cost_key(**given, threads=2, batch_size=4)


def test_a_batch_costs_what_its_tokens_cost() -> None:
    model = measure_cost(
        lambda rows: 0.004 + 0.001 * rows, lambda tokens: 0.1 + 0.01 * tokens, 3, "box|batch=1", rows=8
    )
    assert model.at(1) is model.step
    assert model.at(4).draft_seconds == pytest.approx(0.008)
    assert model.at(4).verify_seconds == pytest.approx((0.14, 0.18, 0.22, 0.26))
    assert model.at(6).verify_seconds == pytest.approx((0.16, 0.22, 0.28, 0.34))
    assert model.at(16).verify_seconds[3] == pytest.approx(0.74)  # beyond what was measured
    assert model.at(4).key == "box|batch=4"
