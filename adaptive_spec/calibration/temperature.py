"""The per-domain temperature that makes draft confidence equal acceptance probability.

``fit_temperature`` is called by ``calibrate``; the decoder applies it per token with ``drafting.policy``.
Guo et al. 2017 divide all logits by the temperature.  Records keep the top probability only, so the draft is treated
as choosing between two outcomes, its top token and the rest: logit(confidence) is divided.  With more than two outcomes
that differs from true temperature scaling, but fit and decoder use the same function, so the fit is what is applied.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from adaptive_spec.settings import CalibrationSettings

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.1, 10.0
_MARGIN = 1e-6  # confidences are kept this far from 0 and 1, where the logit is infinite

FITTED = "fitted"
BLENDED = "blended"
COLD_START = "cold_start"
ONE_OUTCOME = "one_outcome"
NEGATIVE_SLOPE = "negative_slope"


@dataclass(frozen=True, slots=True)
class TemperatureFit:
    """A temperature and how it came about.

    error_before, error_after: expected calibration error on the fitted observations at temperature 1 and at this one.
    reason: fitted | blended | cold_start | one_outcome | negative_slope; the last three fall back to the pooled
    temperature, or to 1 where there is none.
    """

    temperature: float
    num_observations: int
    error_before: float
    error_after: float
    reason: str


def calibrated_confidences(confidence: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    """Apply ``drafting.policy.calibrated_confidence`` to an array of any shape."""
    if temperature == 1:
        return confidence
    return np.asarray(1 / (1 + np.exp(-_logit(confidence) / temperature)))


def expected_calibration_error(confidence: NDArray[np.float64], accepted: NDArray[np.bool_], bins: int = 10) -> float:
    """Return the mean gap between confidence and acceptance over equal-width bins, weighted by count.

    Args:
        confidence, accepted: [observations] each.  Nothing observed is an error of 0.
    """
    if not len(confidence):
        return 0.0
    index = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, weights=confidence - accepted.astype(np.float64), minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def fit_temperature(
    confidence: NDArray[np.float64],
    accepted: NDArray[np.bool_],
    pooled: float | None = None,
    settings: CalibrationSettings | None = None,
) -> TemperatureFit:
    """Fit P(accepted) = sigmoid(logit(confidence) / temperature) and blend it with the pooled temperature.

    The blend is geometric, with weight n / (n + blend_observations) on the domain's own fit; there is none without
    ``pooled``.

    Args:
        confidence, accepted: [observations], reached positions only.
        pooled: the temperature over all domains, which a domain that cannot be fitted gets.
    """
    settings = settings or CalibrationSettings()
    confidence, accepted = np.asarray(confidence, np.float64), np.asarray(accepted, np.bool_)
    num = len(confidence)
    before = expected_calibration_error(confidence, accepted)

    def result(temperature: float, reason: str) -> TemperatureFit:
        after = expected_calibration_error(calibrated_confidences(confidence, temperature), accepted)
        return TemperatureFit(temperature, num, before, after, reason)

    fallback = 1.0 if pooled is None else pooled
    if num < settings.min_observations:
        return result(fallback, COLD_START)
    if accepted.all() or not accepted.any():
        return result(fallback, ONE_OUTCOME)
    slope = _slope(confidence, accepted)
    if not slope > 0:
        return result(fallback, NEGATIVE_SLOPE)
    own = min(max(1 / slope, LOWEST_TEMPERATURE), HIGHEST_TEMPERATURE)
    if pooled is None or not settings.blend_observations:
        return result(own, FITTED)
    weight = num / (num + settings.blend_observations)
    return result(float(own**weight * pooled ** (1 - weight)), BLENDED)


def _slope(confidence: NDArray[np.float64], accepted: NDArray[np.bool_]) -> float:
    # C = inf: no penalty.  CalibratedClassifierCV(method="temperature") on a 1-D decision_function is off by 2.
    model = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-8, max_iter=1000)
    model.fit(_logit(confidence)[:, None], accepted)
    return float(model.coef_[0, 0])


def _logit(confidence: NDArray[np.float64]) -> NDArray[np.float64]:
    inner = np.clip(confidence, _MARGIN, 1 - _MARGIN)
    return np.asarray(np.log(inner / (1 - inner)))
