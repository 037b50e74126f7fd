"""All domains at once: those that show they differ get their own thresholds, others the pooled, nothing is invented."""

import dataclasses
import json

import numpy as np

from adaptive_spec.calibration.baselines import by_floors
from adaptive_spec.calibration.calibrate import alike, calibrate
from adaptive_spec.core import POOLED, LengthRule, MatchAcceptance, Rule, Thresholds
from adaptive_spec.drafting.policy import threshold_floors
from adaptive_spec.records.observations import Observations
from adaptive_spec.settings import CalibrationSettings
from tests.calibration.planted import Chains, chains, linear_cost, record

SETTINGS = CalibrationSettings()
COST = linear_cost(0.005, 0.05, 0.001)
COSTS = {1: COST}
DEAR = {1: linear_cost(0.02, 0.05, 0.01)}


def observed(num_steps: int, low: float, high: float, seed: int = 0) -> Observations:
    return record(chains(num_steps, 6, low, high, seed), Thresholds(), 0.2)


def test_domains_differ_and_small_ones_get_the_pooled_thresholds() -> None:
    observations = {
        "code": observed(800, 0.9, 1.0),
        "legal": observed(800, 0.05, 0.5, seed=1),
        "new": observed(12, 0.5, 1.0, seed=2),
    }
    now = {POOLED: Thresholds(), "code": Thresholds(max_chain_length=2), "silent": Thresholds(max_chain_length=1)}
    results = calibrate(observations, DEAR, SETTINGS, 6, now)
    assert sorted(results) == [POOLED, "code", "legal", "new", "silent"]
    assert results["code"].thresholds.max_chain_length > results["legal"].thresholds.max_chain_length
    assert lengths(results["new"].thresholds) == lengths(results["silent"].thresholds)
    assert lengths(results["new"].thresholds) == lengths(results[POOLED].thresholds)
    sources = {name: result.source for name, result in results.items()}
    assert sources.pop("code") in ("own", "own_scaling")
    assert sources == {POOLED: "own", "legal": "own", "new": "pooled", "silent": "pooled"}
    total = sum(len(part.position) for part in observations.values())
    assert results[POOLED].thresholds.num_observations == total
    code = results["code"].report
    assert code["threshold"]["chosen"]["goodput"] > code["goodput_now"] > 0
    json.dumps({name: result.report for name, result in results.items()})


def test_without_enough_data_everything_stays() -> None:
    now = {POOLED: Thresholds(max_chain_length=3), "code": Thresholds(max_chain_length=2)}
    results = calibrate({"code": observed(5, 0.5, 1.0), "new": observed(5, 0.5, 1.0)}, COSTS, SETTINGS, 6, now)
    assert results["code"].thresholds == now["code"]
    assert results["new"].thresholds == results[POOLED].thresholds == now[POOLED]
    assert all(result.report["source"] == "kept" for result in results.values())
    assert calibrate({}, COSTS, SETTINGS, 6, {})[POOLED].thresholds == Thresholds()


def test_pooling_keeps_requests_of_different_domains_apart() -> None:
    one = observed(600, 0.6, 1.0)
    twice = calibrate({"a": one, "b": one}, COSTS, SETTINGS, 1, {})
    pooled, own = twice[POOLED].report["threshold"], twice["a"].report["threshold"]
    assert np.isclose(pooled["chosen"]["goodput"], own["chosen"]["goodput"], rtol=0.03)
    assert pooled["chosen"]["max_chain_length"] == 1
    assert pooled["high"] - pooled["low"] < own["high"] - own["low"]


def test_the_report_says_what_later_requests_showed() -> None:
    known = chains(2000, 6, 0.1, 1.0)
    confident = dataclasses.replace(known, confidence=known.confidence**0.5)  # it is less often right than it says
    now = {"code": Thresholds(stop_below=0.0, max_chain_length=6)}
    both = {"code": record(confident, now["code"], 1.0), "law": observed(500, 0.2, 0.6)}
    found = calibrate(both, COSTS, SETTINGS, 6, now)
    report = found["code"].report
    later = report["later"]
    assert found[POOLED].report["later"]["num_requests"] == 100 + 25  # the later ones of every domain
    assert later["num_requests"] == 100 and later["num_observations"] == sum(later["num_by_position"])
    errors = {name: check["error"] for name, check in later["calibration"].items()}
    assert errors["new"] < 0.04 < 0.1 < errors["uncalibrated"] == errors["now"]
    assert later["goodput"]["new"] > later["goodput"]["now"] * 1.05
    assert later["goodput_ratio"]["low"] > 1
    assert report["old"]["max_chain_length"] == 6 and report["old"]["stop_below"] == 0
    assert report["new"]["temperature"] != 1


def test_numbers_that_are_fitted_elsewhere_are_carried_on() -> None:
    rule, seen = Rule("logits", min_similarity=0.9), (MatchAcceptance(3, 20, 40),)
    now = {"code": Thresholds(rule=rule, sampling_temperature=0.8), POOLED: Thresholds(sampling_temperature=0.9)}
    results = calibrate({"code": observed(800, 0.9, 1.0)}, COSTS, SETTINGS, 6, now, ngram={"sql": seen})
    code, sql = results["code"].thresholds, results["sql"].thresholds
    assert (code.rule, code.sampling_temperature, code.ngram_acceptance) == (rule, 0.8, ())
    assert (sql.rule, sql.sampling_temperature, sql.ngram_acceptance) == (None, 0.9, seen)
    assert results["sql"].report["ngram"][0]["rate"] == 0.5


def test_alike_are_thresholds_whose_difference_nobody_would_notice() -> None:
    one = Thresholds(1.2, 0.3, 4, (0.8, 0.7), 400, offset=-0.2, ngram_acceptance=(MatchAcceptance(3, 20, 40),))
    same = [
        dataclasses.replace(one, num_observations=900, temperature=1.22, offset=-0.21, survival=(0.79, 0.71)),
        dataclasses.replace(one, ngram_acceptance=(MatchAcceptance(3, 205, 400),)),
    ]
    other = [
        dataclasses.replace(one, temperature=1.3),
        dataclasses.replace(one, offset=-0.3),
        dataclasses.replace(one, warmth=-0.3),
        dataclasses.replace(one, survival=(0.8, 0.6)),
        dataclasses.replace(one, survival=(0.8, 0.7, 0.6)),
        dataclasses.replace(one, max_chain_length=5),
        dataclasses.replace(one, larger_batches=(LengthRule(4, 0.5, 2),)),
        dataclasses.replace(one, rule=Rule("logits")),
        dataclasses.replace(one, ngram_acceptance=(MatchAcceptance(3, 30, 40),)),
        dataclasses.replace(one, ngram_acceptance=(*one.ngram_acceptance, MatchAcceptance(5, 30, 40))),
    ]
    assert all(alike(one, each) and alike(each, one) for each in (one, *same))
    assert not any(alike(one, each) or alike(each, one) for each in other)


def test_in_larger_batches_chains_are_shorter_where_verifying_grows_dear() -> None:
    costs = {1: COST, 8: linear_cost(0.01, 0.06, 0.05)}
    thresholds = calibrate({"code": observed(800, 0.7, 1.0)}, costs, SETTINGS, 6, {})["code"].thresholds
    assert thresholds.lengths_at(1).max_chain_length > thresholds.lengths_at(8).max_chain_length
    assert thresholds.lengths_at(7) == thresholds.lengths_at(1)
    assert thresholds.lengths_at(20) == thresholds.lengths_at(8)


def test_a_rare_domain_never_ends_worse_than_the_pooled_thresholds() -> None:
    """30 requests of 10 steps, alike or unlike the others, judged on fresh chains by brute force."""
    gains: dict[float, list[float]] = {}
    for low, high in ((0.3, 1.0), (0.5, 1.0), (0.05, 0.5)):
        fresh = chains(20_000, 6, low, high, seed=1_000)
        for seed in range(12):
            rare = record(chains(300, 6, low, high, seed), Thresholds(), 0.2, seed)
            results = calibrate({"large": LARGE, "rare": rare}, DEAR, SETTINGS, 6, {})
            own, pooled = (true_goodput(fresh, results[name].thresholds) for name in ("rare", POOLED))
            gains.setdefault(low, []).append(own / pooled - 1)
    assert min(map(min, gains.values())) > -0.015
    assert np.mean(gains[0.05]) > 0.05  # a domain that is unlike the others gains by being so


LARGE = observed(1000, 0.5, 1.0, seed=77)


def true_goodput(known: Chains, thresholds: Thresholds) -> float:
    floors, cost = threshold_floors(thresholds.lengths_at(1), 6), DEAR[1]
    drafted = by_floors(known.confidence, thresholds.scaling, floors).drafted
    emitted = 1 + np.minimum(drafted, np.cumprod(known.accepted, axis=1).sum(axis=1))
    return float(emitted.sum() / (drafted * cost.draft_seconds + np.asarray(cost.verify_seconds)[drafted]).sum())


def lengths(thresholds: Thresholds) -> tuple[float, int]:
    return thresholds.stop_below, thresholds.max_chain_length


def test_everything_accepted_is_calibrated_at_temperature_one() -> None:
    sure = observed(300, 1.0, 1.0)
    result = calibrate({"code": sure}, COSTS, SETTINGS, 6, {})["code"]
    assert result.thresholds.temperature == 1.0
    assert result.report["reason"] == "one_outcome"
    assert result.thresholds.max_chain_length == 6
