"""The per-domain scaling that makes draft confidence equal acceptance probability.

``fit_scaling`` is called by ``calibrate``; the decoder applies it per token with ``drafting.policy``.
Guo et al. 2017 divide all logits by a temperature.  Records keep the top probability only, so the draft is treated as
choosing between two outcomes, its top token and the rest: logit(confidence) is divided, and an offset is added (Platt
1999).  Without the offset a confidence of one half would stay one half at every temperature, and a draft of a foreign
domain, wrong nine times in ten at a confidence of .2, could not be corrected.  What is added for a request's own
temperature is fitted with them, because tokens drawn at random are refused more often (docs/decisions/0010-scaling.md).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from adaptive_spec.core import Scaling
from adaptive_spec.records.observations import Observations
from adaptive_spec.settings import CalibrationSettings

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.1, 10.0
LARGEST_SHIFT = 50.0  # of offset and warmth: far beyond what a confidence of 1 - 1e-6 needs at any temperature but that
_MARGIN = 1e-6  # confidences are kept this far from 0 and 1, where the logit is infinite
_CHANCES = 200

FITTED = "fitted"
BLENDED = "blended"
COLD_START = "cold_start"
ONE_OUTCOME = "one_outcome"
NEGATIVE_SLOPE = "negative_slope"


@dataclass(frozen=True, slots=True)
class ScalingFit:
    """A scaling and how it came about.

    reason: fitted | blended | cold_start | one_outcome | negative_slope; the last three fall back to the pooled
    scaling, or to the identity where there is none.
    """

    scaling: Scaling
    num_observations: int
    reason: str


@dataclass(frozen=True, slots=True)
class Bin:
    """One bar of a reliability diagram: means over the ``count`` observations whose confidence lies in it."""

    confidence: float
    acceptance: float
    count: int


@dataclass(frozen=True, slots=True)
class CalibrationCheck:
    """Expected calibration error of some observations under a scaling.

    by_chance: what it would be, on average, if every confidence were right: so few observations show no less.
    """

    num_observations: int
    error: float
    by_chance: float
    bins: tuple[Bin, ...]


def calibrated_confidences(
    confidence: NDArray[np.float64], scaling: Scaling, request_temperature: NDArray[np.float64] | float = 0.0
) -> NDArray[np.float64]:
    """Apply ``drafting.policy.calibrated_confidence`` to an array of any shape."""
    if scaling == Scaling():
        return confidence
    added = scaling.offset + scaling.warmth * request_temperature
    return np.asarray(1 / (1 + np.exp(-_logit(confidence) / scaling.temperature - added)))


def expected_calibration_error(confidence: NDArray[np.float64], accepted: NDArray[np.bool_], bins: int = 10) -> float:
    """Return the mean gap between confidence and acceptance over equal-width bins, weighted by count.

    Args:
        confidence, accepted: [observations] each.  Nothing observed is an error of 0.
    """
    if not len(confidence):
        return 0.0
    gap = np.bincount(_bin(confidence, bins), weights=confidence - accepted.astype(np.float64), minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def check_calibration(observed: Observations, scaling: Scaling, bins: int = 10, seed: int = 0) -> CalibrationCheck:
    """Say how far confidences are from acceptance, best asked of data that the scaling was not fitted to."""
    calibrated = calibrated_confidences(observed.confidence, scaling, observed.request_temperature)
    accepted = observed.accepted
    place, random = _bin(calibrated, bins), np.random.default_rng(seed)
    chances = [
        expected_calibration_error(calibrated, random.random(len(calibrated)) < calibrated, bins)
        for _ in range(_CHANCES)
    ]
    found = tuple(
        Bin(float(calibrated[inside].mean()), float(accepted[inside].mean()), int(inside.sum()))
        for inside in (place == index for index in range(bins))
        if inside.any()
    )
    error = expected_calibration_error(calibrated, accepted, bins)
    return CalibrationCheck(len(calibrated), error, float(np.mean(chances)), found)


def fit_scaling(
    observed: Observations,
    pooled: Scaling | None = None,
    settings: CalibrationSettings | None = None,
    believed_warmth: float = 0.0,
) -> ScalingFit:
    """Fit P(accepted) as ``core.Scaling`` says, by maximum likelihood, and blend it with the pooled scaling.

    The blend has weight n / (n + blend_observations) on the domain's own fit, geometric in the temperature; there is
    none without ``pooled``.  Where all requests have the same temperature its effect cannot be told from the offset:
    the pooled one is believed.

    Args:
        observed: reached positions only.
        pooled: the scaling over all domains, which a domain that cannot be fitted gets.
        believed_warmth: what is believed where there is no pooled one.
    """
    settings = settings or CalibrationSettings()
    accepted, num = observed.accepted, len(observed.accepted)
    fallback = pooled or Scaling(warmth=believed_warmth)
    if num < settings.min_observations:
        return ScalingFit(fallback, num, COLD_START)
    if accepted.all() or not accepted.any():
        return ScalingFit(fallback, num, ONE_OUTCOME)
    slope, offset, warmth = _coefficients(observed, fallback.warmth)
    if not slope > 0:
        return ScalingFit(fallback, num, NEGATIVE_SLOPE)
    own = Scaling(1 / slope, offset, warmth)
    if pooled is None or not settings.blend_observations:
        return ScalingFit(own, num, FITTED)
    weight = num / (num + settings.blend_observations)
    blended = Scaling(
        float(own.temperature**weight * pooled.temperature ** (1 - weight)),
        weight * own.offset + (1 - weight) * pooled.offset,
        weight * own.warmth + (1 - weight) * pooled.warmth,
    )
    return ScalingFit(blended, num, BLENDED)


def _coefficients(observed: Observations, believed_warmth: float) -> tuple[float, float, float]:
    """Of the logit, the offset, and of the request's temperature.

    Where one is out of bounds, because confidences part what is accepted from what is not or all but do, the likeliest
    of those within: clipping one alone would leave the others fitted to it.
    """
    # C = inf: no penalty.  CalibratedClassifierCV(method="temperature") on a 1-D decision_function is off by 2.
    model = LogisticRegression(C=np.inf, tol=1e-8, max_iter=1000)
    logit, heat = _logit(observed.confidence), observed.request_temperature
    if np.ptp(heat) > 0:
        slope, warmth = map(float, model.fit(np.stack([logit, heat], axis=1), observed.accepted).coef_[0])
        found = slope, float(model.intercept_[0]), warmth
    else:
        slope = float(model.fit(logit[:, None], observed.accepted).coef_[0, 0])
        found = slope, float(model.intercept_[0]) - believed_warmth * float(heat[0]), believed_warmth
    if slope <= 0 or _within(found):
        return found
    return _likeliest_within(logit, heat, observed.accepted, None if np.ptp(heat) > 0 else believed_warmth)


def _within(coefficients: tuple[float, float, float]) -> bool:
    slope, offset, warmth = coefficients
    return 1 / HIGHEST_TEMPERATURE <= slope <= 1 / LOWEST_TEMPERATURE and max(abs(offset), abs(warmth)) <= LARGEST_SHIFT


def _likeliest_within(
    logit: NDArray[np.float64], heat: NDArray[np.float64], accepted: NDArray[np.bool_], warmth: float | None
) -> tuple[float, float, float]:
    """The most likely coefficients within the bounds; ``warmth``: what it is believed to be."""
    columns = np.stack([logit, np.ones_like(logit), heat], axis=1)

    def loss(at: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        z = columns @ at
        return float((np.logaddexp(0, z) - accepted * z).sum()), columns.T @ (1 / (1 + np.exp(-z)) - accepted)

    shift = (-LARGEST_SHIFT, LARGEST_SHIFT)
    bounds = [(1 / HIGHEST_TEMPERATURE, 1 / LOWEST_TEMPERATURE), shift, shift if warmth is None else (warmth, warmth)]
    found = minimize(loss, np.array([1.0, 0.0, warmth or 0.0]), jac=True, bounds=bounds, method="L-BFGS-B")
    slope, offset, heated = map(float, found.x)
    return slope, offset, heated


def _bin(confidence: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    return np.minimum((confidence * bins).astype(np.int64), bins - 1)


def _logit(confidence: NDArray[np.float64]) -> NDArray[np.float64]:
    inner = np.clip(confidence, _MARGIN, 1 - _MARGIN)
    return np.asarray(np.log(inner / (1 - inner)))
