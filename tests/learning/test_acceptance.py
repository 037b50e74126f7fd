"""Acceptance figures: expected steps against simulated ones, intervals that cover, differences that pair."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from adaptive_spec.core import POOLED
from adaptive_spec.learning.acceptance import (
    MEASURES,
    check_same_requests,
    drawn,
    expected_steps,
    ratio,
    ratio_difference,
    sums_of,
)
from adaptive_spec.learning.evaluate import replay
from tests.learning.judged import domain_of, judged


def simulated_steps(acceptance: list[float], chain_length: int, random: np.random.Generator) -> int:
    position = steps = 0
    while position < len(acceptance):
        kept = 0
        while (
            kept < chain_length and position + kept < len(acceptance) and random.random() < acceptance[position + kept]
        ):
            kept += 1
        position += kept + 1
        steps += 1
    return steps


@pytest.mark.parametrize("chain_length", [1, 3, 6])
def test_expected_steps_are_the_mean_of_simulated_ones(chain_length: int) -> None:
    random = np.random.default_rng(chain_length)
    acceptance = random.random(23).tolist()
    steps = [simulated_steps(acceptance, chain_length, random) for _ in range(4000)]
    error = np.std(steps) / np.sqrt(len(steps))
    assert expected_steps(np.asarray(acceptance), chain_length) == pytest.approx(np.mean(steps), abs=4 * error)


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 6))
def test_with_certain_positions_it_is_the_greedy_replay(agrees: list[bool], chain_length: int) -> None:
    expected = expected_steps(np.asarray(agrees, float), chain_length)
    assert expected == pytest.approx(sum(1 for _ in replay(agrees, chain_length)))


def test_the_sums_are_those_of_the_requests() -> None:
    found = sums_of(
        [judged("a", [True] * 5, [0.5] * 5), judged("b", [False, True, True], [0.2, 0.4, 0.6], domain="sql")], 4
    )
    assert found.num_tokens.tolist() == [5, 3] and found.num_agreeing.tolist() == [5, 2]
    assert found.num_steps.tolist() == [1, 2]
    assert found.overlap.tolist() == pytest.approx([2.5, 1.2])
    assert found.overlap_without_tail.tolist() == pytest.approx([1.25, 0.6])
    only = found.only("sql")
    assert only.request_ids == ("b",) and only.num_steps.tolist() == [2]
    assert found.only(POOLED) is found
    draws = drawn(2, 0)
    assert ratio(*found.of("acceptance_length"), draws).value == pytest.approx(8 / 3)
    assert ratio(*found.of("expected_acceptance"), draws).value == pytest.approx(3.7 / 8)
    assert ratio(*found.of("agreement"), draws).low is None, "two requests have no interval"


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Requests of two kinds, drawn at random; the truth is the ratio over both kinds."""
    random = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        kind = random.integers(0, 2, 60)
        tokens, steps = np.where(kind, 60.0, 20.0), np.where(kind, 20.0, 18.0)
        found = ratio(tokens, steps, drawn(60, seed))
        assert found.low is not None and found.high is not None
        covered += found.low <= 80 / 38 <= found.high
    assert 182 <= covered <= 199  # 95 % of 200, give or take three standard deviations


def test_differences_are_paired() -> None:
    """Requests differ far more than drafts: only on the same requests does the difference show."""
    tokens = np.full(40, 100.0)
    theirs = np.linspace(25, 95, 40)
    ours = theirs - 2
    draws = drawn(40, 1)
    difference = ratio_difference((tokens, ours), (tokens, theirs), draws)
    alone = [ratio(tokens, steps, draws) for steps in (ours, theirs)]
    assert difference.low is not None and difference.low > 0
    assert alone[0].low is not None and alone[1].high is not None and alone[0].low < alone[1].high
    assert difference.value == pytest.approx(alone[0].value - alone[1].value)
    assert drawn(40, 1).tolist() == draws.tolist() and (draws.sum(1) == 40).all()


def test_other_requests_cannot_be_paired() -> None:
    first, second = (sums_of(rows, 4) for rows in domain_of([0.5, 0.6], 5, seed=0))
    check_same_requests({"a": first, "b": second})
    with pytest.raises(ValueError, match="same requests"):
        check_same_requests({"a": first, "b": sums_of(domain_of([0.5], 6, seed=0)[0], 4)})
    assert all(len(first.of(measure)[0]) == 5 for measure in MEASURES)
