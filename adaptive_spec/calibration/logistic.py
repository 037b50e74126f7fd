"""A pooled estimator of acceptance, and the chain it would verify, in the manner of vLLM pull request 52228.

P(accepted | reached) = sigmoid(weight x logit(top probability) + bias of the position), one fit for all traffic.  There
the drafter draws its whole chain first and the estimate decides how much of it is verified; so it is here, and the
drafted tokens are paid for.  How many are drafted is chosen too, to be fair to it where drafting is dear.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from adaptive_spec.calibration.baselines import Choice
from adaptive_spec.calibration.threshold import MIN_REACHED, Replay
from adaptive_spec.core import Scaling, StepCost
from adaptive_spec.errors import NotEnoughDataError
from adaptive_spec.records.observations import Observations

_MARGIN = 1e-6  # confidences are kept this far from 0 and 1
_PENALTY = 100.0  # scikit-learn's C: so weak that it only settles what the data leave open
_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class Estimator:
    """weight: of the top probability's logit.  biases: by position; the last serves all later ones."""

    weight: float
    biases: tuple[float, ...]

    def probabilities(self, confidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """P(accepted | reached).  [steps, longest] -> [steps, longest]"""
        place = np.minimum(np.arange(confidence.shape[1]), len(self.biases) - 1)
        return np.asarray(1 / (1 + np.exp(-self.weight * _logit(confidence) - np.asarray(self.biases)[place])))


def fit_estimator(observations: Observations) -> Estimator:
    """Fit to reached positions; those that fewer than ``MIN_REACHED`` steps reached share the bias before.

    Raises:
        NotEnoughDataError: too few positions, or all accepted, or all refused.
    """
    position, accepted = observations.position, observations.accepted
    reached = np.bincount(position, minlength=1)
    num_biases = int((reached >= MIN_REACHED).cumprod().sum())
    if not num_biases or accepted.all() or not accepted.any():
        raise NotEnoughDataError(
            f"The estimator needs {MIN_REACHED} reached positions, accepted and refused ones. Serve some traffic first."
        )
    place = np.minimum(position, num_biases - 1)
    features = np.concatenate([_logit(observations.confidence)[:, None], np.eye(num_biases)[place]], axis=1)
    model = LogisticRegression(C=_PENALTY, fit_intercept=False, tol=1e-8, max_iter=1000).fit(features, accepted)
    weight, *biases = map(float, model.coef_[0])
    return Estimator(weight, tuple(biases))


@dataclass(frozen=True, slots=True)
class Verification:
    """depth: tokens drafted in every step.  rate: what a second is worth, in tokens."""

    estimator: Estimator
    depth: int
    rate: float

    def choose(self, confidence: NDArray[np.float64], cost: StepCost) -> Choice:
        """Verify of each chain as much as its expected tokens are worth the time.  confidence: [steps, longest]"""
        depth = min(self.depth, confidence.shape[1])
        emitted = _expected(self.estimator.probabilities(confidence[:, :depth]))
        verified = (emitted - self.rate * _seconds(cost, depth)).argmax(axis=1)
        drafted = np.full(len(confidence), depth, np.int64)
        return Choice(drafted, np.asarray(verified, np.int64), drafted < self.depth)


def learn_verification(
    observations: Observations, cost: StepCost, max_chain_length: int, seed: int = 0
) -> Verification:
    """Fit the estimator to earlier traffic, all domains together, and plan on its completed chains.

    Raises:
        NotEnoughDataError: too little is on record.
    """
    estimator = fit_estimator(observations)
    confidence = Replay.complete(observations, Scaling(), max_chain_length, seed).confidence
    return plan_verification(estimator, confidence, cost)


def plan_verification(estimator: Estimator, confidence: NDArray[np.float64], cost: StepCost) -> Verification:
    """Return the depth and the rate with the largest goodput that the estimator expects of these chains.

    confidence: [steps, longest], of earlier traffic.
    """
    rates = [_rate(estimator, confidence, cost, depth) for depth in range(confidence.shape[1] + 1)]
    depth = int(np.argmax(rates))
    return Verification(estimator, depth, rates[depth])


def _rate(estimator: Estimator, confidence: NDArray[np.float64], cost: StepCost, depth: int) -> float:
    """Expected goodput at the best lengths, lengths and rate found in turns."""
    emitted = _expected(estimator.probabilities(confidence[:, :depth]))
    seconds, steps = _seconds(cost, depth), np.arange(len(confidence))
    rate = float(1 / seconds[0])
    for _ in range(_ROUNDS):
        lengths = (emitted - rate * seconds).argmax(axis=1)
        reached = float(emitted[steps, lengths].sum() / seconds[lengths].sum())
        if reached <= rate:
            break
        rate = reached
    return rate


def _expected(probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens emitted when 0, 1 … are verified.  [steps, depth] -> [steps, depth + 1]"""
    reach = np.cumprod(probabilities, axis=1)
    return np.concatenate([np.ones((len(reach), 1)), 1 + np.cumsum(reach, axis=1)], axis=1)


def _seconds(cost: StepCost, depth: int) -> NDArray[np.float64]:
    """Of a step that drafts ``depth`` tokens and verifies 0, 1 … of them.  [depth + 1]"""
    return np.asarray(depth * cost.draft_seconds + np.asarray(cost.verify_seconds[: depth + 1]))


def _logit(confidence: NDArray[np.float64]) -> NDArray[np.float64]:
    inner = np.clip(confidence, _MARGIN, 1 - _MARGIN)
    return np.asarray(np.log(inner / (1 - inner)))
