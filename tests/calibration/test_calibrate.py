"""All domains at once: large ones get their own thresholds, small ones the pooled, nothing is invented."""

import json

import numpy as np

from adaptive_spec.calibration.calibrate import calibrate
from adaptive_spec.core import POOLED, Thresholds
from adaptive_spec.records.observations import Observations
from adaptive_spec.settings import CalibrationSettings
from tests.calibration.planted import chains, linear_cost, record

SETTINGS = CalibrationSettings()
COST = linear_cost(0.005, 0.05, 0.001)


def observed(num_steps: int, low: float, high: float, seed: int = 0) -> Observations:
    return record(chains(num_steps, 6, low, high, seed), Thresholds(), 0.2)


def test_domains_differ_and_small_ones_get_the_pooled_thresholds() -> None:
    observations = {
        "code": observed(800, 0.9, 1.0),
        "legal": observed(800, 0.05, 0.5, seed=1),
        "new": observed(12, 0.5, 1.0, seed=2),
    }
    now = {POOLED: Thresholds(), "code": Thresholds(max_chain_length=2), "silent": Thresholds(max_chain_length=1)}
    results = calibrate(observations, COST, SETTINGS, 6, now)
    assert sorted(results) == [POOLED, "code", "legal", "new", "silent"]
    assert results["code"].thresholds.max_chain_length > results["legal"].thresholds.max_chain_length
    assert results["new"].thresholds == results["silent"].thresholds == results[POOLED].thresholds
    assert {name: result.report["source"] for name, result in results.items()} == {
        POOLED: "own", "code": "own", "legal": "own", "new": "pooled", "silent": "pooled",
    }  # fmt: skip
    total = sum(len(part.position) for part in observations.values())
    assert results[POOLED].thresholds.num_observations == total
    code = results["code"].report
    assert code["threshold"]["chosen"]["goodput"] > code["goodput_now"] > 0
    json.dumps({name: result.report for name, result in results.items()})


def test_without_enough_data_everything_stays() -> None:
    now = {POOLED: Thresholds(max_chain_length=3), "code": Thresholds(max_chain_length=2)}
    results = calibrate({"code": observed(5, 0.5, 1.0), "new": observed(5, 0.5, 1.0)}, COST, SETTINGS, 6, now)
    assert results["code"].thresholds == now["code"]
    assert results["new"].thresholds == results[POOLED].thresholds == now[POOLED]
    assert all(result.report["source"] == "kept" for result in results.values())
    assert calibrate({}, COST, SETTINGS, 6, {})[POOLED].thresholds == Thresholds()


def test_pooling_keeps_requests_of_different_domains_apart() -> None:
    one = observed(600, 0.6, 1.0)
    twice = calibrate({"a": one, "b": one}, COST, SETTINGS, 1, {})
    pooled, own = twice[POOLED].report["threshold"], twice["a"].report["threshold"]
    assert np.isclose(pooled["chosen"]["goodput"], own["chosen"]["goodput"], rtol=0.03)
    assert pooled["chosen"]["max_chain_length"] == 1
    assert pooled["high"] - pooled["low"] < own["high"] - own["low"]


def test_everything_accepted_is_calibrated_at_temperature_one() -> None:
    sure = observed(300, 1.0, 1.0)
    result = calibrate({"code": sure}, COST, SETTINGS, 6, {})["code"]
    assert result.thresholds.temperature == 1.0
    assert result.report["reason"] == "one_outcome"
    assert result.thresholds.max_chain_length == 6
