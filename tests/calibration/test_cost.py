"""Costs: outliers ignored, verification monotone, nonsense refused."""

import itertools

import pytest

from adaptive_spec.calibration.cost import cost_key, measure_cost


def test_medians_without_warm_up_and_outliers() -> None:
    draft = itertools.chain([9.0], itertools.cycle([0.010, 0.011, 0.010, 5.0, 0.012]))
    cost = measure_cost(lambda rows: next(draft), lambda rows, length: 0.02 + 0.001 * length, 3, "here").step
    assert cost.draft_seconds == pytest.approx(0.0105, abs=0.0005)
    assert cost.verify_seconds == pytest.approx((0.02, 0.021, 0.022, 0.023))
    assert cost.key == "here"


def test_verification_never_gets_cheaper_with_length() -> None:
    noisy = [0.020, 0.030, 0.022, 0.026]
    cost = measure_cost(lambda rows: 0.01, lambda rows, length: noisy[length], 3, "here").step
    assert list(cost.verify_seconds) == sorted(cost.verify_seconds)
    assert cost.verify_seconds == pytest.approx((0.020, 0.026, 0.026, 0.026))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_broken_timer_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        measure_cost(lambda rows: bad, lambda rows, length: 0.01, 2, "here")
    with pytest.raises(ValueError, match="repeats"):
        measure_cost(lambda rows: 0.01, lambda rows, length: 0.01, 2, "here", repeats=0)


def test_key_names_everything_that_changes_the_cost() -> None:
    given = {"target": "a", "draft": "b", "dtype": "float32", "device": "cpu"}
    key = cost_key(**given, threads=2, batch_size=4, hardware="box")
    assert key == "box|cpu|a|b|float32|threads=2|batch=4"
    assert cost_key(**given, threads=2, batch_size=8) != cost_key(**given, threads=2, batch_size=4)


def test_a_batch_costs_what_it_costs() -> None:
    asked = set()

    def verify(rows: int, length: int) -> float:
        asked.add((rows, length))
        return 0.1 + 0.01 * rows * (length + 1)

    model = measure_cost(lambda rows: 0.004 + 0.001 * rows, verify, 6, "box|batch=1", rows=6)
    assert {rows for rows, _ in asked} == {1, 2, 4, 6}
    assert {length for rows, length in asked if rows == 6} == {0, 1, 3, 6}
    assert model.at(1) is model.step
    assert model.at(4).draft_seconds == pytest.approx(0.008)
    assert model.at(4).verify_seconds[:4] == pytest.approx((0.14, 0.18, 0.22, 0.26))
    assert model.at(5).verify_seconds[2] == pytest.approx(0.25)  # between two batches, between two lengths
    assert model.at(60).verify_seconds == model.at(6).verify_seconds
    assert (model.step.key, model.at(4).key, model.at(5).key) == ("box|batch=1", "box|batch=4", "box|batch=5")
