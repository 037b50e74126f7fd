"""Thresholds: right at both ends, and equal to brute force in between."""

import dataclasses
import json

import numpy as np
import pytest

from adaptive_spec.calibration.threshold import STOP_BELOW_GRID, Replay, choose_threshold
from adaptive_spec.core import Scaling, Thresholds
from adaptive_spec.errors import NotEnoughDataError
from tests.calibration.planted import chains, linear_cost, record, simulate

EVERYTHING = Thresholds(stop_below=0.0, max_chain_length=6)


def test_no_speculation_when_drafting_cannot_pay() -> None:
    observations = record(chains(500, 6, 0.1, 0.5), EVERYTHING, 0.1)
    thresholds, report = choose_threshold(observations, Scaling(), {1: linear_cost(0.02, 0.02, 0.01)}, 6, seed=0)
    assert thresholds.max_chain_length == 0
    assert report.chosen == report.baseline == report.curve[0]
    assert report.baseline.goodput == pytest.approx(50.0)


def test_full_length_when_acceptance_is_near_one_and_drafting_cheap() -> None:
    observations = record(chains(500, 6, 0.98, 1.0), EVERYTHING, 0.1)
    thresholds, report = choose_threshold(observations, Scaling(), {1: linear_cost(0.001, 0.1)}, 6, seed=0)
    assert thresholds.max_chain_length == 6
    assert report.chosen.drafted_tokens > 5.9
    assert report.chosen.goodput > 5 * report.baseline.goodput
    assert report.low < report.chosen.goodput < report.high
    assert thresholds.num_observations == len(observations.position)
    assert min(thresholds.survival) > 0.95 and len(thresholds.survival) == 6


@pytest.mark.parametrize(
    ("live", "explore_share"),
    [(EVERYTHING, 1.0), (Thresholds(stop_below=0.4, max_chain_length=4), 0.15), (Thresholds(max_chain_length=0), 0.4)],
)
def test_replay_of_censored_records_matches_brute_force(live: Thresholds, explore_share: float) -> None:
    known = chains(6000, 6, 0.3, 1.0)
    cost = linear_cost(0.01, 0.05, 0.002)
    replay = Replay.complete(record(known, live, explore_share), Scaling(), 6, seed=0)
    for stop_below in (0.0, 0.2, 0.4, 0.7):
        for length in (0, 1, 3, 6):
            expected = simulate(known, Thresholds(1.0, stop_below, length), cost)
            assert replay.goodput(cost, stop_below, length).goodput == pytest.approx(expected, rel=0.03)


def test_choice_is_as_good_as_the_best_by_brute_force() -> None:
    known = chains(2000, 6, 0.1, 1.0, shared=0.8)
    cost = linear_cost(0.02, 0.05)
    chosen, report = choose_threshold(record(known, Thresholds(), 0.2), Scaling(), {1: cost}, 6, seed=0)
    assert chosen.stop_below > 0
    goodputs = [simulate(known, Thresholds(1.0, stop, 6), cost) for stop in STOP_BELOW_GRID[::2]]
    assert simulate(known, chosen, cost) > 0.98 * max(goodputs)
    assert report.curve[-1].max_chain_length == 6


def test_survival_is_that_of_explored_steps() -> None:
    known = chains(4000, 6, 0.2, 1.0, shared=0.0)
    thresholds, _ = choose_threshold(
        record(known, Thresholds(stop_below=0.6), 0.3), Scaling(), {1: linear_cost(0.01, 0.05)}, 6, seed=0
    )
    reached = np.cumprod(np.c_[np.ones(len(known.accepted)), known.accepted[:, :-1]], axis=1).astype(bool)
    for position in range(3):
        expected = known.accepted[reached[:, position], position].mean()
        assert thresholds.survival[position] == pytest.approx(expected, abs=0.07)


def test_same_seed_same_choice_and_the_report_is_json() -> None:
    observations = record(chains(300, 6, 0.2, 1.0), Thresholds(), 0.1)
    cost = linear_cost(0.01, 0.05)
    first, second = (choose_threshold(observations, Scaling(1.3), {1: cost}, 6, seed=5) for _ in range(2))
    assert first == second
    assert json.loads(json.dumps(first[1].to_dict()))["cost_key"] == "planted"


def test_lengths_beyond_the_cost_the_limit_or_the_records_are_no_candidates() -> None:
    observations = record(chains(300, 6, 0.98, 1.0), EVERYTHING, 0.1)
    cost = linear_cost(0.001, 0.1)
    assert choose_threshold(observations, Scaling(), {1: cost}, 3, seed=0)[0].max_chain_length == 3
    short_cost = linear_cost(0.001, 0.1, length=2)
    assert choose_threshold(observations, Scaling(), {1: short_cost}, 6, seed=0)[0].max_chain_length == 2
    seldom = record(chains(300, 6, 0.98, 1.0), Thresholds(stop_below=0.0, max_chain_length=2), 0.0)
    assert choose_threshold(seldom, Scaling(), {1: cost}, 6, seed=0)[0].max_chain_length == 2
    assert choose_threshold(observations, Scaling(), {1: cost}, 0, seed=0)[0].max_chain_length == 0


def test_too_little_or_disordered_records_are_refused() -> None:
    observations = record(chains(300, 6, 0.5, 1.0), EVERYTHING, 0.1)
    cost = linear_cost(0.001, 0.1)
    with pytest.raises(NotEnoughDataError, match="Serve some traffic"):
        choose_threshold(record(chains(5, 6, 0.5, 1.0), EVERYTHING, 0.1), Scaling(), {1: cost}, 6, seed=0)
    backwards = dataclasses.replace(observations, position=observations.position[::-1])
    with pytest.raises(ValueError, match="ordered"):
        choose_threshold(backwards, Scaling(), {1: cost}, 6, seed=0)
