"""What a calibration says of each domain's verifier, within what the operator set."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adaptive_spec.calibration.calibrate import DomainCalibration
from adaptive_spec.calibration.rules import serving, with_rules
from adaptive_spec.core import POOLED, Rule, Thresholds
from adaptive_spec.records.evidence import RecordedChains
from adaptive_spec.settings import VerificationSettings
from tests.calibration.evidence import planted

LEARNED = Thresholds(stop_below=0.3, rule=Rule("logits", min_similarity=0.9))


def operator(**given: Any) -> VerificationSettings:
    return VerificationSettings(**{"verifier": "logits", "domain_budgets": {"code": 0.1}, **given})


def calibrated(
    settings: VerificationSettings,
    evidence: dict[str, RecordedChains],
    now: dict[str, Thresholds] | None = None,
    temperature: float = 1.0,
) -> dict[str, DomainCalibration]:
    fitted = {
        name: DomainCalibration(Thresholds(temperature, stop_below=0.5), {"source": "own"}) for name in (POOLED, "code")
    }
    return with_rules(fitted, evidence, settings, now or {})


def test_a_domain_gets_the_numbers_that_its_evidence_certifies() -> None:
    chains = planted(800)
    found = calibrated(operator(), {"code": chains}, {"code": LEARNED})["code"]
    rule, report = found.thresholds.rule, found.report["rule"]
    assert rule is not None and rule.verifier == "logits" and found.thresholds.stop_below == 0.5
    assert rule == replace(operator().rule("code"), min_similarity=rule.min_similarity)
    assert (report["reason"], report["verifier"], report["numbers"]) == ("certified", "logits", rule.numbers)
    assert report["before"] == {"verifier": "logits", "numbers": {"similarity": "tv", "min_similarity": 0.9}}
    assert (report["budget"], report["confidence"], report["num_requests"]) == (0.1, 0.9, 800)
    assert report["divergence_share"] < 0.1 and report["p_value"] <= 0.1
    assert report["tokens_per_step"] > report["tokens_per_step_before"] > 1
    assert report["held_out"]["num_requests"] == 266 and report["held_out"]["divergence_share"] < 0.1
    assert found.report["source"] == "own"
    json.dumps(found.report, allow_nan=False)


@pytest.mark.parametrize(
    ("evidence", "num_requests", "reason"),
    [
        ({}, 0, "not_enough"),
        ({"code": planted(21)}, 21, "not_enough"),
        ({"code": planted(300, hardness=1.0)}, 300, "nothing_fits"),
    ],
)
def test_what_is_not_certified_is_exact(evidence: dict[str, RecordedChains], num_requests: int, reason: str) -> None:
    settings = operator(verifier="ngram", domain_verifiers={"code": "ngram"})
    found = calibrated(settings, evidence, {"code": LEARNED})["code"]
    assert found.thresholds.rule == replace(settings.rule("code"), verifier="exact")
    report = found.report["rule"]
    assert (report["verifier"], report["numbers"], report["num_requests"]) == ("exact", {}, num_requests)
    assert report["reason"] == reason and report["requests_needed"] == 22
    assert settings.choice("code", found.thresholds.rule).verifier == "exact"  # also where the operator set another
    json.dumps(found.report, allow_nan=False)


@pytest.mark.parametrize(
    "settings",
    [
        VerificationSettings(),
        operator(evidence_share=0.0),
        operator(verifier="typical"),
        operator(domain_budgets={"code": 0.0}),
        operator(domain_verifiers={"code": "exact"}, allowed=("logits",)),
    ],
)
def test_where_nothing_is_calibrated_the_operators_numbers_come_back(settings: VerificationSettings) -> None:
    found = calibrated(settings, {"code": planted(300)}, {"code": LEARNED})
    assert found["code"].thresholds.rule is None and "rule" not in found["code"].report
    assert found[POOLED].thresholds.rule is None


def test_a_rule_is_of_its_domain_alone() -> None:
    """Not of all: new domains run on the operator's numbers.  Evidence of a domain not yet fitted is used, too."""
    found = calibrated(operator(divergence_budget=0.1), {"code": planted(300), "new": planted(300, seed=1)})
    assert found[POOLED].thresholds.rule is None
    assert found["new"].report["source"] == "pooled" and found["new"].report["rule"]["reason"] == "certified"
    assert replace(found["new"].thresholds, rule=None) == found[POOLED].thresholds


def test_of_allowed_verifiers_one_is_chosen_where_exact_is_set() -> None:
    """The chains' similarity says nothing of the strict verdict here, and their n-grams everything."""
    settings = operator(verifier="exact", allowed=("ngram", "logits", "typical"))
    found = calibrated(settings, {"code": planted(800)})["code"].report["rule"]
    assert (found["verifier"], found["before"]) == ("logits", {"verifier": "exact", "numbers": {}})
    assert found["requests_needed"] == 29  # twice as many hypotheses to err on


def test_similarities_count_only_as_they_would_be_compared() -> None:
    chains = planted(300)
    assert len(serving("code", chains, Thresholds(9.0, sampling_temperature=0.5), operator())) == len(chains)
    sampled = replace(chains, greedy=~chains.greedy, temperature=1.5 * chains.temperature)
    for temperature, some in ((1.5, 1), (1.53, 1), (1.0, 0), (2.0, 0)):
        drawn_at = Thresholds(sampling_temperature=temperature)
        assert len(serving("code", sampled, drawn_at, operator())) == some * len(chains), temperature
    empty = replace(chains, lengths=np.zeros_like(chains.lengths))  # they stay and go with their neighbours
    assert len(serving("code", empty, Thresholds(), operator())) == len(chains)
    assert len(serving("code", chains, Thresholds(), operator(similarity="js"))) == 0
    words = operator(verifier="ngram", similarity="js")  # compares tokens, whatever they were drawn at
    assert len(serving("code", sampled, Thresholds(), words)) == len(chains)
