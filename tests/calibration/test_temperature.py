"""Temperatures: recovered when planted, refused when the data cannot carry one."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from adaptive_spec.calibration.temperature import (
    calibrated_confidences,
    expected_calibration_error,
    fit_temperature,
)
from adaptive_spec.drafting.policy import calibrated_confidence
from adaptive_spec.settings import CalibrationSettings

SETTINGS = CalibrationSettings()


def planted(temperature: float, num: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    random = np.random.default_rng(seed)
    logits = random.normal(1.0, 2.0, num)
    accepted = random.random(num) < 1 / (1 + np.exp(-logits / temperature))
    return 1 / (1 + np.exp(-logits)), accepted


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_planted_temperature_is_recovered(temperature: float) -> None:
    fit = fit_temperature(*planted(temperature, 100_000), settings=SETTINGS)
    assert fit.temperature == pytest.approx(temperature, rel=0.03)
    assert fit.reason == "fitted"
    assert fit.error_after < 0.01
    if temperature != 1:
        assert fit.error_after < fit.error_before


def test_cold_start_is_identity_or_pooled() -> None:
    confidence, accepted = planted(2.0, SETTINGS.min_observations - 1)
    assert fit_temperature(confidence, accepted, settings=SETTINGS).temperature == 1.0
    fit = fit_temperature(confidence, accepted, pooled=1.5, settings=SETTINGS)
    assert (fit.temperature, fit.reason) == (1.5, "cold_start")
    assert fit_temperature(confidence[:0], accepted[:0]).reason == "cold_start"


@pytest.mark.parametrize("outcome", [True, False])
def test_one_outcome_is_refused(outcome: bool) -> None:
    confidence, _ = planted(1.0, 500)
    fit = fit_temperature(confidence, np.full(500, outcome), settings=SETTINGS)
    assert (fit.temperature, fit.reason) == (1.0, "one_outcome")


def test_negative_slope_is_refused() -> None:
    confidence, accepted = planted(1.0, 2000)
    fit = fit_temperature(confidence, ~accepted, pooled=1.2, settings=SETTINGS)
    assert (fit.temperature, fit.reason) == (1.2, "negative_slope")


def test_blend_weighs_by_observations() -> None:
    confidence, accepted = planted(2.0, 64)
    own = fit_temperature(confidence, accepted, settings=SETTINGS).temperature
    fit = fit_temperature(confidence, accepted, pooled=1.0, settings=SETTINGS)
    assert fit.reason == "blended"
    assert fit.temperature == pytest.approx(own**0.5)  # 64 / (64 + 64)


def test_expected_calibration_error_matches_a_plain_loop() -> None:
    confidence, accepted = planted(3.0, 1000)
    confidence[:2] = 0.0, 1.0
    expected = 0.0
    for index in range(10):
        inside = [i for i, c in enumerate(confidence) if min(int(c * 10), 9) == index]
        if inside:
            gap = np.mean([confidence[i] for i in inside]) - np.mean([accepted[i] for i in inside])
            expected += len(inside) / 1000 * abs(float(gap))
    assert expected_calibration_error(confidence, accepted) == pytest.approx(expected)


def test_calibrated_confidence_agrees_with_its_array_form() -> None:
    values = np.asarray([0.0, 1e-9, 0.2, 0.5, 0.97, 1.0])
    for temperature in (0.3, 1.0, 4.0):
        array = calibrated_confidences(values, temperature)
        tensor = calibrated_confidence(torch.tensor(values), torch.tensor(temperature))
        np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-5)
        assert ((array >= 0) & (array <= 1)).all()
    assert float(calibrated_confidence(torch.tensor(0.8), torch.tensor(2.0))) == pytest.approx(2 / 3)
