"""Costs: outliers ignored, verification monotone, nonsense refused."""

import itertools
import json
from typing import Any

import pytest

from adaptive_spec.calibration.cost import CostKeeper, CostModel, cost_key, measure_cost
from adaptive_spec.core import StepCost


def test_medians_without_warm_up_and_outliers() -> None:
    draft = itertools.chain([9.0], itertools.cycle([0.010, 0.011, 0.010, 5.0, 0.012]))
    cost = measure_cost(
        lambda rows, context: next(draft), lambda rows, length, context: 0.02 + 0.001 * length, 3, "here"
    ).step
    assert cost.draft_seconds == pytest.approx(0.0105, abs=0.0005)
    assert cost.verify_seconds == pytest.approx((0.02, 0.021, 0.022, 0.023))
    assert cost.key == "here"


def test_verification_never_gets_cheaper_with_length() -> None:
    noisy = [0.020, 0.030, 0.022, 0.026]
    cost = measure_cost(lambda rows, context: 0.01, lambda rows, length, context: noisy[length], 3, "here").step
    assert list(cost.verify_seconds) == sorted(cost.verify_seconds)
    assert cost.verify_seconds == pytest.approx((0.020, 0.026, 0.026, 0.026))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_broken_timer_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        measure_cost(lambda rows, context: bad, lambda rows, length, context: 0.01, 2, "here")
    with pytest.raises(ValueError, match="repeats"):
        measure_cost(lambda rows, context: 0.01, lambda rows, length, context: 0.01, 2, "here", repeats=0)


def test_key_names_everything_that_changes_the_cost() -> None:
    given = {"target": "a", "draft": "b", "dtype": "float32", "device": "cpu"}
    key = cost_key(**given, threads=2, batch_size=4, hardware="box")
    assert key == "box|cpu|a|b|float32|threads=2|batch=4"
    assert cost_key(**given, threads=2, batch_size=8) != cost_key(**given, threads=2, batch_size=4)


def test_a_batch_costs_what_it_costs() -> None:
    asked = set()

    def verify(rows: int, length: int, context: int) -> float:
        asked.add((rows, length))
        return 0.1 + 0.01 * rows * (length + 1)

    model = measure_cost(lambda rows, context: 0.004 + 0.001 * rows, verify, 6, "box|batch=1", rows=6)
    assert {rows for rows, _ in asked} == {1, 2, 4, 6}
    assert {length for rows, length in asked if rows == 6} == {0, 1, 3, 6}
    assert model.at(1) is model.step
    assert model.at(4).draft_seconds == pytest.approx(0.008)
    assert model.at(4).verify_seconds[:4] == pytest.approx((0.14, 0.18, 0.22, 0.26))
    assert model.at(5).verify_seconds[2] == pytest.approx(0.25)  # between two batches, between two lengths
    assert model.at(60).verify_seconds == model.at(6).verify_seconds
    assert (model.step.key, model.at(4).key, model.at(5).key) == ("box|batch=1", "box|batch=4", "box|batch=5")


def test_context_costs_what_it_costs_for_each_row() -> None:
    """Drafting: 2 ms + 1 µs a token of context; verifying: 20 ms + 1 ms a chain token + 4 µs a token of context."""
    asked = set()

    def verify(rows: int, length: int, context: int) -> float:
        asked.add((rows, context))
        return 0.02 + 0.001 * length + 4e-6 * context * rows

    model = measure_cost(
        lambda rows, context: 0.002 + 1e-6 * context * rows, verify, 4, "box|batch=1", rows=4, contexts=(100, 1100)
    )
    assert asked == {(1, 100), (2, 100), (4, 100), (1, 1100)}
    assert model.at(1, 50) is model.at(1) is model.step
    assert model.step.verify_seconds[2] == pytest.approx(0.02 + 0.002 + 4e-4)
    assert model.at(1, 100 + 1280).verify_seconds[2] == pytest.approx(0.02 + 0.002 + 4e-6 * 1380)
    assert model.at(4, 100 + 1280).draft_seconds == pytest.approx(0.002 + 4e-6 * 1380)
    assert model.at(3, 100 + 1280).verify_seconds[0] == pytest.approx(0.02 + 12e-6 * 1380)
    assert model.at(1, 100 + 1300) is model.at(1, 100 + 1280)  # priced in steps


def flat() -> CostModel:
    step = StepCost(0.01, (0.1, 0.11, 0.12), "box|batch=1")
    return CostModel(
        {1: step, 4: StepCost(0.02, (0.2, 0.22, 0.24), "box|batch=4")}, 160, StepCost(0.0, (0.0,) * 3, "box")
    )


def test_it_is_kept_as_json_and_refused_under_another_key() -> None:
    model = flat()
    again = CostModel.from_dict(json.loads(json.dumps(model.to_dict())), "box|batch=1")
    assert again.to_dict() == model.to_dict() and again.at(4) == model.at(4)
    with pytest.raises(ValueError, match=r"measured for 'box\|batch=1', not for 'other'"):
        CostModel.from_dict(model.to_dict(), "other")


@pytest.mark.parametrize(
    "change",
    [
        {"measured": {}},
        {"measured": {"1": {"draft_seconds": 0.0, "verify_seconds": [1.0]}}},
        {"measured": {"1": {"draft_seconds": 1.0, "verify_seconds": [1.0, float("nan")]}}},
        {"measured": {"1": {"draft_seconds": 1.0}}},
        {"measured": None},
        {"per_context_token": {"draft_seconds": 0.0, "verify_seconds": [0.0]}},
    ],
)
def test_damaged_costs_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="these costs"):
        CostModel.from_dict({**flat().to_dict(), **change}, "box|batch=1")


def test_costs_follow_what_steps_take() -> None:
    """Verifying alone became 1.5 times dearer, in batches of 4 twice; outliers among them; drafting stayed."""
    keeper = CostKeeper(flat())
    for index in range(128):
        slow = 1.5 if index % 16 else 40.0
        if index % 2:
            keeper.add(1, 1, 100, 0.01, 0.11 * slow)
        else:
            keeper.add(4, 2, 100, None, 0.24 * 2.0)
    cost = keeper.model.at(1)
    assert cost.verify_seconds[1] == pytest.approx(0.11 * 1.5)
    assert keeper.model.at(4).verify_seconds[2] == pytest.approx(0.24 * 2.0)
    assert cost.draft_seconds == pytest.approx(0.01)
    assert list(cost.verify_seconds) == sorted(cost.verify_seconds)
    assert keeper.model.at(4).verify_seconds[0] == pytest.approx(0.2 * 2.0)  # never met: moves with its batch
    assert keeper.model.step.key == "box|batch=1"
    for _ in range(128):  # and back again
        keeper.add(1, 1, 100, 0.01, 0.11)
    assert keeper.model.at(1).verify_seconds[1] == pytest.approx(0.11)


def test_too_little_is_not_believed() -> None:
    keeper = CostKeeper(flat())
    for _ in range(7):
        keeper.add(1, 1, 100, 0.05, 0.9)
    for _ in range(121):
        keeper.add(1, 0, 100, None, 0.1)
    assert keeper.model.at(1).draft_seconds == pytest.approx(0.01)
    assert keeper.model.at(1).verify_seconds[1] == pytest.approx(0.11)
