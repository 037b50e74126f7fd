"""What records show is biased by who looked: the verifier stops at a refusal, the policy at a doubt.

A planted example where counting naively misleads, and where what calibration and the decoder count does not.
"""

import numpy as np
import pytest
from numpy.typing import NDArray

from adaptive_spec.calibration.threshold import Replay
from adaptive_spec.core import Release, Scaling, Thresholds
from adaptive_spec.decoding.served import Lineup
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import DraftWeights, LoadedRelease
from adaptive_spec.records.observations import Observations
from tests.calibration.planted import chains, drafted, linear_cost, record, simulate

LIVE = Thresholds(stop_below=0.6, max_chain_length=4)
KNOWN = chains(20_000, 4, 0.2, 1.0, shared=0.8)
EXPLORED = 0.1


def truth() -> NDArray[np.float64]:
    """P(accepted | reached) of every position, had all chains been drafted whole."""
    reached = np.cumprod(np.c_[np.ones(len(KNOWN.accepted)), KNOWN.accepted[:, :-1]], axis=1).astype(bool)
    return np.asarray([KNOWN.accepted[reached[:, place], place].mean() for place in range(4)])


@pytest.fixture(scope="module")
def recorded() -> Observations:
    return record(KNOWN, LIVE, EXPLORED)


def by_position(observed: Observations, counted: NDArray[np.bool_]) -> NDArray[np.float64]:
    return np.asarray([observed.accepted[counted & (observed.position == place)].mean() for place in range(4)])


def test_acceptance_per_drafted_token_is_too_low() -> None:
    """The usual ratio counts tokens behind a refusal as refused; conditioning on reach does not."""
    lengths = np.asarray([drafted(confidence, LIVE) for confidence in KNOWN.confidence])
    kept = np.minimum(np.cumprod(KNOWN.accepted, axis=1).sum(axis=1), lengths)
    naive = [(kept[lengths > place] > place).mean() for place in range(4)]
    assert all(naive[place] < truth()[place] - 0.05 for place in (1, 2))


def test_acceptance_of_what_the_policy_drafted_is_too_high(recorded: Observations) -> None:
    """It goes on where it is confident, so those who got far are the easy ones; explored steps are all alike."""
    naive = by_position(recorded, ~recorded.explored)
    assert all(naive[place] > truth()[place] + 0.03 for place in (1, 2, 3))
    np.testing.assert_allclose(by_position(recorded, recorded.explored), truth(), atol=0.03)


def test_survival_of_a_calibration_is_the_true_one(recorded: Observations) -> None:
    survival = Replay.complete(recorded, Scaling(), 4, seed=0).survival
    np.testing.assert_allclose(survival, truth(), atol=0.03)


def test_goodput_beyond_the_old_threshold_is_corrected_for_what_it_censored(recorded: Observations) -> None:
    """Chains of 4 for everyone: what they would bring is read off the few that were drafted so far only by mistake."""
    cost = linear_cost(0.01, 0.05, 0.002, length=4)
    wanted = simulate(KNOWN, Thresholds(stop_below=0.0, max_chain_length=4), cost)
    step = np.cumsum(recorded.position == 0) - 1
    lengths = np.bincount(step)
    kept = np.bincount(step, weights=recorded.accepted)
    got_far = (lengths == 4) | (kept < lengths)  # ends that the policy did not choose
    naive = float((kept[got_far] + 1).mean()) / (4 * cost.draft_seconds + cost.verify_seconds[4])
    ours = Replay.complete(recorded, Scaling(), 4, seed=0).goodput(cost, 0.0, 4).goodput
    assert ours == pytest.approx(wanted, rel=0.02)
    assert abs(naive / wanted - 1) > 0.05


def test_counters_restart_with_each_release(pair: ModelPair) -> None:
    weights = DraftWeights(pair.draft)
    lineup = Lineup(weights.prepare(LoadedRelease()))
    for _ in range(64):
        lineup.live.survivals.add("code", 2, 2)
    before = lineup.live.survivals
    assert before["code"].curve() == before.pooled.curve() == (1.0, 1.0)
    lineup.swap(weights.prepare(LoadedRelease(Release(1))))
    assert lineup.live.survivals["code"].curve() == lineup.live.survivals.pooled.curve() == ()
