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
from adaptive_spec.settings import CalibrationSettings

SETTINGS = CalibrationSettings()


def planted(scaling: Scaling, num: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    random = np.random.default_rng(seed)
    logits = random.normal(1.0, 2.0, num)
    accepted = random.random(num) < 1 / (1 + np.exp(-logits / scaling.temperature - scaling.offset))
    return 1 / (1 + np.exp(-logits)), accepted


@pytest.mark.parametrize("scaling", [Scaling(0.5), Scaling(), Scaling(2.5), Scaling(1.4, -1.5), Scaling(0.8, 0.7)])
def test_planted_scaling_is_recovered(scaling: Scaling) -> None:
    confidence, accepted = planted(scaling, 100_000)
    fit = fit_scaling(confidence, accepted, settings=SETTINGS)
    assert fit.scaling.temperature == pytest.approx(scaling.temperature, rel=0.03)
    assert fit.scaling.offset == pytest.approx(scaling.offset, abs=0.03)
    assert fit.reason == "fitted"
    later = planted(scaling, 100_000, seed=1)
    after, before = check_calibration(*later, fit.scaling), check_calibration(*later, Scaling())
    assert after.error < 0.01
    if scaling != Scaling():
        assert after.error < before.error


def test_a_foreign_domain_needs_the_offset() -> None:
    """Wrong nine times in ten at confidences around .2: no temperature can say so, it leaves one half where it is."""
    random = np.random.default_rng(0)
    confidence = 1 / (1 + np.exp(-random.normal(-1.2, 1.0, 20_000)))
    accepted = random.random(20_000) < calibrated_confidences(confidence, Scaling(2.0, -1.8))
    temperatures = [check_calibration(confidence, accepted, Scaling(t)).error for t in np.linspace(0.1, 3, 30)]
    fitted = check_calibration(confidence, accepted, fit_scaling(confidence, accepted).scaling)
    assert fitted.error < 0.01 < 0.04 < min(temperatures)


def test_cold_start_is_identity_or_pooled() -> None:
    confidence, accepted = planted(Scaling(2.0), SETTINGS.min_observations - 1)
    assert fit_scaling(confidence, accepted, settings=SETTINGS).scaling == Scaling()
    fit = fit_scaling(confidence, accepted, pooled=Scaling(1.5, 0.2), settings=SETTINGS)
    assert (fit.scaling, fit.reason) == (Scaling(1.5, 0.2), "cold_start")
    assert fit_scaling(confidence[:0], accepted[:0]).reason == "cold_start"


@pytest.mark.parametrize("outcome", [True, False])
def test_one_outcome_is_refused(outcome: bool) -> None:
    confidence, _ = planted(Scaling(), 500)
    fit = fit_scaling(confidence, np.full(500, outcome), settings=SETTINGS)
    assert (fit.scaling, fit.reason) == (Scaling(), "one_outcome")


def test_negative_slope_is_refused() -> None:
    confidence, accepted = planted(Scaling(), 2000)
    fit = fit_scaling(confidence, ~accepted, pooled=Scaling(1.2), settings=SETTINGS)
    assert (fit.scaling, fit.reason) == (Scaling(1.2), "negative_slope")


def test_blend_weighs_by_observations() -> None:
    confidence, accepted = planted(Scaling(2.0), 64)
    own = fit_scaling(confidence, accepted, settings=SETTINGS).scaling
    fit = fit_scaling(confidence, accepted, pooled=Scaling(1.0, 1.0), settings=SETTINGS)
    assert fit.reason == "blended"
    assert fit.scaling.temperature == pytest.approx(own.temperature**0.5)  # 64 / (64 + 64)
    assert fit.scaling.offset == pytest.approx((own.offset + 1) / 2)


def test_expected_calibration_error_matches_a_plain_loop() -> None:
    confidence, accepted = planted(Scaling(3.0), 1000)
    confidence[:2] = 0.0, 1.0
    expected = 0.0
    for index in range(10):
        inside = [i for i, c in enumerate(confidence) if min(int(c * 10), 9) == index]
        if inside:
            gap = np.mean([confidence[i] for i in inside]) - np.mean([accepted[i] for i in inside])
            expected += len(inside) / 1000 * abs(float(gap))
    assert expected_calibration_error(confidence, accepted) == pytest.approx(expected)
    check = check_calibration(confidence, accepted, Scaling())
    assert check.error == pytest.approx(expected)
    assert sum(each.count for each in check.bins) == check.num_observations == 1000
    by_bins = sum(each.count * abs(each.confidence - each.acceptance) for each in check.bins) / 1000
    assert by_bins == pytest.approx(expected)


def test_the_error_by_chance_is_what_right_confidences_show() -> None:
    confidence, accepted = planted(Scaling(), 400)
    check = check_calibration(confidence, accepted, Scaling())
    shown = [expected_calibration_error(*planted(Scaling(), 400, seed)) for seed in range(200)]
    assert check.by_chance == pytest.approx(float(np.mean(shown)), rel=0.15)
    many = check_calibration(*planted(Scaling(), 40_000), Scaling())
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
