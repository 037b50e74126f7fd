"""The pooled estimator: counts where confidences say nothing, planted numbers where they do, verification by hand."""

import numpy as np
import pytest

from adaptive_spec.calibration.logistic import Estimator, Verification, fit_estimator, plan_verification
from adaptive_spec.core import StepCost
from adaptive_spec.errors import NotEnoughDataError
from adaptive_spec.records.observations import Observations

COST = StepCost(0.1, (1.0, 1.2, 1.4), "")
AS_IT_IS = Estimator(1.0, (0.0,))


def observed(position: np.ndarray, confidence: np.ndarray, accepted: np.ndarray) -> Observations:
    nothing = np.zeros(len(position))
    return Observations(
        position, confidence, nothing, accepted, nothing.astype(np.int64), nothing.astype(np.bool_), nothing
    )


def test_equal_confidences_leave_the_acceptance_of_each_position() -> None:
    position = np.repeat([0, 1, 2], [400, 300, 5])
    accepted = np.concatenate([np.arange(400) < 300, np.arange(300) < 60, np.ones(5, bool)])
    estimator = fit_estimator(observed(position, np.full(705, 0.5), accepted))
    found = estimator.probabilities(np.full((1, 4), 0.5))[0]
    # The third position was reached by 5 only, so it shares the second's bias: (60 + 5) / 305.
    assert found == pytest.approx([0.75, 65 / 305, 65 / 305, 65 / 305], abs=0.002)


def test_planted_weight_and_biases_are_found() -> None:
    random = np.random.default_rng(0)
    planted = Estimator(0.7, (0.5, -0.5))
    confidence = random.uniform(0.05, 0.99, (20_000, 2))
    accepted = random.random(confidence.shape) < planted.probabilities(confidence)
    position = np.tile([0, 1], 20_000)
    found = fit_estimator(observed(position, confidence.ravel(), accepted.ravel()))
    assert (found.weight, *found.biases) == pytest.approx((0.7, 0.5, -0.5), abs=0.05)


def test_verification_by_hand() -> None:
    confidence = np.array([[0.9, 0.9], [0.1, 0.1]])
    # Two drafted: 1, 1.9 or 2.71 tokens in 1.2, 1.4 or 1.6 s, and 1, 1.1 or 1.11.  One verifies two, the other none.
    plan = plan_verification(AS_IT_IS, confidence, COST)
    assert (plan.depth, plan.rate) == (2, pytest.approx((2.71 + 1) / (1.6 + 1.2)))
    choice = plan.choose(confidence, COST)
    assert choice.drafted.tolist() == [2, 2]
    assert choice.verified.tolist() == [2, 0]


def test_dear_drafting_is_not_planned_and_short_chains_are_cut() -> None:
    confidence = np.array([[0.9, 0.9], [0.1, 0.1]])
    dear = StepCost(2.0, COST.verify_seconds, "")
    assert plan_verification(AS_IT_IS, confidence, dear) == Verification(AS_IT_IS, 0, 1.0)
    assert Verification(AS_IT_IS, 3, 1.0).choose(confidence, COST).cut.all()


def test_one_outcome_or_nothing_is_refused() -> None:
    for size, accepted in ((50, np.ones(50, bool)), (50, np.zeros(50, bool)), (4, np.arange(4) < 2)):
        with pytest.raises(NotEnoughDataError, match="Serve some traffic"):
            fit_estimator(observed(np.zeros(size, np.int64), np.full(size, 0.5), accepted))
