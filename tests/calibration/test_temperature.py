"""Scalings: recovered when planted, refused when the data cannot carry one."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from adaptive_spec.calibration.temperature import (
    calibrated_confidences,
    check_calibration,
    expected_calibration_error,
    fit_scaling,
)
from adaptive_spec.core import Scaling
from adaptive_spec.drafting.policy import calibrated_confidence
from adaptive_spec.records.observations import Observations
from adaptive_spec.settings import CalibrationSettings

SETTINGS = CalibrationSettings()


def observed(
    confidence: NDArray[np.float64], accepted: NDArray[np.bool_], heat: float | NDArray[np.float64] = 0.0
) -> Observations:
    nothing = np.zeros(len(confidence))
    whole = nothing.astype(np.int64)
    return Observations(whole, confidence, nothing, accepted, whole, accepted, heat + nothing)


def planted(scaling: Scaling, num: int, seed: int = 0, heats: tuple[float, ...] = (0.0, 0.7, 1.0)) -> Observations:
    random = np.random.default_rng(seed)
    logits, heat = random.normal(1.0, 2.0, num), random.choice(heats, num)
    added = scaling.offset + scaling.warmth * heat
    accepted = random.random(num) < 1 / (1 + np.exp(-logits / scaling.temperature - added))
    return observed(1 / (1 + np.exp(-logits)), accepted, heat)


SCALINGS = [Scaling(0.5), Scaling(), Scaling(2.5), Scaling(1.4, -1.5), Scaling(0.8, 0.7), Scaling(1.2, 0.3, -0.8)]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_planted_scaling_is_recovered(scaling: Scaling) -> None:
    fit = fit_scaling(planted(scaling, 100_000), settings=SETTINGS)
    assert fit.scaling.temperature == pytest.approx(scaling.temperature, rel=0.03)
    assert fit.scaling.offset == pytest.approx(scaling.offset, abs=0.05)
    assert fit.scaling.warmth == pytest.approx(scaling.warmth, abs=0.07)
    assert fit.reason == "fitted"
    later = planted(scaling, 100_000, seed=1)
    after, before = check_calibration(later, fit.scaling), check_calibration(later, Scaling())
    assert after.error < 0.01
    if scaling != Scaling():
        assert after.error < before.error


def test_a_foreign_domain_needs_the_offset() -> None:
    """Wrong nine times in ten at confidences around .2: no temperature can say so, it leaves one half where it is."""
    random = np.random.default_rng(0)
    confidence = 1 / (1 + np.exp(-random.normal(-1.2, 1.0, 20_000)))
    accepted = random.random(20_000) < calibrated_confidences(confidence, Scaling(2.0, -1.8))
    seen = observed(confidence, accepted)
    temperatures = [check_calibration(seen, Scaling(t)).error for t in np.linspace(0.1, 3, 30)]
    fitted = check_calibration(seen, fit_scaling(seen).scaling)
    assert fitted.error < 0.01 < 0.04 < min(temperatures)


def test_cold_start_is_identity_or_pooled() -> None:
    few = planted(Scaling(2.0), SETTINGS.min_observations - 1)
    assert fit_scaling(few, settings=SETTINGS).scaling == Scaling()
    fit = fit_scaling(few, pooled=Scaling(1.5, 0.2), settings=SETTINGS)
    assert (fit.scaling, fit.reason) == (Scaling(1.5, 0.2), "cold_start")
    assert fit_scaling(planted(Scaling(), 0)).reason == "cold_start"


def test_without_different_temperatures_warmth_is_believed_not_fitted() -> None:
    scaling = Scaling(1.2, 0.3, -0.8)
    warm = fit_scaling(planted(scaling, 50_000, heats=(0.7,)), pooled=Scaling(1, 0, -0.8), settings=SETTINGS).scaling
    assert warm.warmth == pytest.approx(-0.8) and warm.offset == pytest.approx(0.3, abs=0.05)
    greedy = fit_scaling(planted(scaling, 50_000, heats=(0.0,)), settings=SETTINGS).scaling
    assert greedy.warmth == 0 and greedy.offset == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("outcome", [True, False])
def test_one_outcome_is_refused(outcome: bool) -> None:
    fit = fit_scaling(observed(planted(Scaling(), 500).confidence, np.full(500, outcome)), settings=SETTINGS)
    assert (fit.scaling, fit.reason) == (Scaling(), "one_outcome")


def test_negative_slope_is_refused() -> None:
    right = planted(Scaling(), 2000)
    fit = fit_scaling(observed(right.confidence, ~right.accepted), pooled=Scaling(1.2), settings=SETTINGS)
    assert (fit.scaling, fit.reason) == (Scaling(1.2), "negative_slope")


def test_blend_weighs_by_observations() -> None:
    seen = planted(Scaling(2.0), 64, heats=(0.0,))
    own = fit_scaling(seen, settings=SETTINGS).scaling
    fit = fit_scaling(seen, pooled=Scaling(1.0, 1.0), settings=SETTINGS)
    assert fit.reason == "blended"
    assert fit.scaling.temperature == pytest.approx(own.temperature**0.5)  # 64 / (64 + 64)
    assert fit.scaling.offset == pytest.approx((own.offset + 1) / 2)


def test_expected_calibration_error_matches_a_plain_loop() -> None:
    seen = planted(Scaling(3.0), 1000)
    confidence, accepted = seen.confidence, seen.accepted
    confidence[:2] = 0.0, 1.0
    expected = 0.0
    for index in range(10):
        inside = [i for i, c in enumerate(confidence) if min(int(c * 10), 9) == index]
        if inside:
            gap = np.mean([confidence[i] for i in inside]) - np.mean([accepted[i] for i in inside])
            expected += len(inside) / 1000 * abs(float(gap))
    assert expected_calibration_error(confidence, accepted) == pytest.approx(expected)
    check = check_calibration(seen, Scaling())
    assert check.error == pytest.approx(expected)
    assert sum(each.count for each in check.bins) == check.num_observations == 1000
    by_bins = sum(each.count * abs(each.confidence - each.acceptance) for each in check.bins) / 1000
    assert by_bins == pytest.approx(expected)


def test_the_error_by_chance_is_what_right_confidences_show() -> None:
    check = check_calibration(planted(Scaling(), 400), Scaling())
    shown = [check_calibration(planted(Scaling(), 400, seed), Scaling(), seed=seed).error for seed in range(100)]
    assert check.by_chance == pytest.approx(float(np.mean(shown)), rel=0.15)
    many = check_calibration(planted(Scaling(), 40_000), Scaling())
    assert many.by_chance < check.by_chance / 5


def test_calibrated_confidence_agrees_with_its_array_form() -> None:
    values = np.asarray([0.0, 1e-9, 0.2, 0.5, 0.97, 1.0])
    for scaling in (Scaling(0.3), Scaling(), Scaling(4.0), Scaling(1.0, -2.0), Scaling(2.0, 1.0)):
        array = calibrated_confidences(values, scaling)
        tensor = calibrated_confidence(
            torch.tensor(values), torch.tensor(scaling.temperature), torch.tensor(scaling.offset)
        )
        np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-5)
        assert ((array >= 0) & (array <= 1)).all()
    half, zero = torch.tensor(0.8), torch.tensor(0.0)
    assert float(calibrated_confidence(half, torch.tensor(2.0), zero)) == pytest.approx(2 / 3)


@pytest.mark.parametrize("heats", [(0.0,), (0.0, 0.8)])
@pytest.mark.parametrize("edge", [0.02, 0.6, 0.999])
def test_confidences_that_part_kept_from_refused_give_a_scaling_that_a_release_can_hold(
    edge: float, heats: tuple[float, ...]
) -> None:
    """The likeliest slope is endless then; within the bounds the parting point stays where it is."""
    random = np.random.default_rng(0)
    confidence = 1 / (1 + np.exp(-random.normal(np.log(edge / (1 - edge)), 2.0, 500)))
    seen = observed(confidence, confidence > edge, random.choice(heats, 500))
    scaling = fit_scaling(seen, settings=SETTINGS).scaling
    assert 0.1 <= scaling.temperature < 0.2 and abs(scaling.offset) <= 50 and abs(scaling.warmth) <= 50
    calibrated = calibrated_confidences(confidence, scaling, seen.request_temperature)
    assert expected_calibration_error(calibrated, seen.accepted) < 0.05
    assert ((calibrated > 0.5) == seen.accepted).mean() > 0.98
