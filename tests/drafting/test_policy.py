"""Length policies: floors by hand, against brute force, and what they leave out."""

import itertools
import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_spec.core import LengthRule, StepCost, Thresholds
from adaptive_spec.drafting.policy import best_length, stopping_floors, threshold_floors
from adaptive_spec.drafting.survival import SurvivalCounter

CHEAP = StepCost(0.1, (1.0, 1.0, 1.0, 1.0, 1.0), "draft a tenth of a step, verification flat")


def test_thresholds_draw_one_token_before_they_compare() -> None:
    thresholds = Thresholds(
        stop_below=0.3, max_chain_length=3, larger_batches=(LengthRule(4, 0.5, 1), LengthRule(16, 0, 0))
    )
    assert threshold_floors(thresholds.lengths_at(3), 8) == (0.0, 0.3, 0.3)
    assert threshold_floors(thresholds.lengths_at(3), 2) == (0.0, 0.3)
    assert threshold_floors(thresholds.lengths_at(15), 8) == (0.0,)
    assert threshold_floors(thresholds.lengths_at(64), 8) == ()


def test_stopping_floors_by_hand() -> None:
    """Two positions that live with 1/2: the best length is 2, at (1 + 0.75) / 1.2 tokens a second."""
    floors = stopping_floors((0.5, 0.5), CHEAP, 4)
    rate = 1.75 / 1.2
    assert floors[1] == pytest.approx(rate * 0.1 / 0.5)
    assert floors[0] == pytest.approx(min(rate * 0.1 / 0.5, rate * 0.2 / 0.75))


def test_the_best_length_by_hand() -> None:
    flat = StepCost(1.0, (10.0, 10.0, 10.0, 10.0), "flat")
    assert best_length([0.9, 0.81, 0.73], flat) == 3
    steep = StepCost(1.0, (10.0, 14.0, 30.0, 40.0), "steep")
    # emitted / seconds: 1/10 = .100, 1.5/14 = .107, 1.75/30 = .058
    assert best_length([0.5, 0.25, 0.125], steep) == 1
    # with a drafted token costing 5: 1.5/19 = .079
    assert best_length([0.5, 0.25, 0.125], steep, draft_seconds=5.0) == 0
    assert best_length([0.3, 0.09], steep) == 0
    assert best_length([0.99] * 9, flat) == 3  # never beyond what was measured
    assert best_length([0.1] * 4, None) == 4
    # 4 rows of which one gains: 4/10 = .400, 4.5/14 = .321; three that gain: 5.5/14 = .393; four: 6/14 = .429
    assert best_length([0.5], steep, rows=4) == 0
    assert best_length([1.5], steep, rows=4) == 0
    assert best_length([2.0], steep, rows=4) == 1


def test_nothing_is_drafted_where_nothing_pays() -> None:
    assert stopping_floors((0.05, 0.05), CHEAP, 4)[0] > 1
    assert stopping_floors((0.0, 0.0), CHEAP, 4) == (math.inf, math.inf)
    assert stopping_floors((), CHEAP, 4) == ()


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4),
    st.floats(0.01, 2.0),
    st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
)
def test_the_first_token_is_drawn_exactly_where_a_fixed_length_pays(
    survival: list[float], draft: float, more: list[float]
) -> None:
    cost = StepCost(draft, tuple(itertools.accumulate([1.0, *more])), "any")
    floors = stopping_floors(tuple(survival), cost, 4)
    if best_length(list(itertools.accumulate(survival, operator.mul)), cost, draft):
        assert floors[0] <= 1 + 1e-9
    else:
        assert floors[0] >= 1 - 1e-9


def test_survival_counts_what_was_reached() -> None:
    counter = SurvivalCounter()
    for _ in range(8):
        counter.add(3, 3)
        assert counter.curve() == ()
        counter.add(3, 1)
    assert counter.curve() == (1.0, 0.5, 1.0)
    counter.add(5, 5)
    assert counter.curve()[3:] == (1.0, 1.0)  # hardly reached: as the position before


def test_a_belief_gives_way_to_what_is_counted() -> None:
    counter = SurvivalCounter()
    for _ in range(16):
        counter.add(2, 0)
    assert counter.curve() == (0.0, 0.0)
    assert counter.curve((0.8, 0.6)) == (pytest.approx(0.4), pytest.approx(0.6))
    for _ in range(112):
        counter.add(2, 0)
    assert counter.curve((0.8,))[0] == pytest.approx(16 * 0.8 / 144)


def test_survival_follows_traffic_that_changes() -> None:
    counter = SurvivalCounter()
    for _ in range(5000):
        counter.add(1, 1)
    for _ in range(1000):
        counter.add(1, 0)
    assert counter.curve()[0] < 0.2
