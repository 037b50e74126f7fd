"""The verifier's rule of each domain: what its evidence certifies under its divergence budget, else exact.

Called by the pipeline, after thresholds of drafting have been fitted.  The operator decides which verifiers and which
budget (``settings.verification``); this room only finds numbers within that.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from adaptive_spec.calibration.calibrate import DomainCalibration
from adaptive_spec.calibration.risk import REPLAYABLE, Choice, Replayed, backtest, choose, path, replay, requests_needed
from adaptive_spec.calibration.temperature import COLD_START
from adaptive_spec.core import POOLED, Rule, Thresholds
from adaptive_spec.records.evidence import RecordedChains
from adaptive_spec.settings import VerificationSettings

_SAME_TEMPERATURE = 0.05  # relative; further apart, similarities on record are not those that would be compared


def with_rules(
    calibrations: Mapping[str, DomainCalibration],
    evidence: Mapping[str, RecordedChains],
    settings: VerificationSettings,
    now: Mapping[str, Thresholds],
) -> dict[str, DomainCalibration]:
    """Return the calibrations with each domain's rule, and domains of which there is evidence alone under pooled ones.

    Domains where no verifier is to be calibrated have none, so that they run as the operator set them, and neither has
    ``POOLED``: a rule is certified for one domain's traffic.  The report's ``rule`` says what was decided and why.

    Args:
        evidence: by domain, of the draft that the calibrations are for.
        now: the thresholds that are live.
    """
    found: dict[str, DomainCalibration] = {}
    for domain in sorted({*calibrations, *evidence}):
        made = calibrations.get(domain) or _pooled(calibrations[POOLED])
        if domain == POOLED or not settings.calibrated(domain):
            found[domain] = replace(made, thresholds=replace(made.thresholds, rule=None))
            continue
        live = (now.get(domain) or now.get(POOLED) or Thresholds()).rule
        rule, report = _calibrated(domain, evidence.get(domain), made.thresholds, settings, live)
        found[domain] = DomainCalibration(replace(made.thresholds, rule=rule), {**made.report, "rule": report})
    return found


def serving(
    domain: str, recorded: RecordedChains, thresholds: Thresholds, settings: VerificationSettings
) -> RecordedChains:
    """The chains of times when similarities were compared as they would be under these thresholds.

    All chains of such a time or none, the empty ones too: choosing by what a chain is would tilt the shares.
    """
    if settings.calibrated(domain) == ("ngram",):
        return recorded
    wanted = np.where(recorded.greedy, 1.0, thresholds.sampling_temperature)
    near = abs(recorded.temperature / wanted - 1) <= _SAME_TEMPERATURE
    return recorded.select(near & (recorded.measure == settings.rule(domain).similarity))


def replayed_paths(domain: str, chains: RecordedChains, settings: VerificationSettings) -> list[Replayed]:
    """What every rule that may be chosen would have made of a domain's chains, a path per verifier."""
    return [replay(path(name, settings.rule(domain)), chains) for name in settings.calibrated(domain)]


def _calibrated(
    domain: str,
    recorded: RecordedChains | None,
    thresholds: Thresholds,
    settings: VerificationSettings,
    live: Rule | None,
) -> tuple[Rule, dict[str, Any]]:
    """The rule and its report, in JSON types."""
    budget, confidence = settings.budget(domain), settings.budget_confidence
    before, as_set = settings.choice(domain, live), settings.rule(domain)
    report: dict[str, Any] = {"budget": budget, "confidence": confidence, "before": _named(before)}
    chains = None if recorded is None else serving(domain, recorded, thresholds, settings)
    if chains is None or not len(chains):
        exact = replace(as_set, verifier="exact")
        needed = requests_needed(budget, confidence, len(settings.calibrated(domain)))
        nothing = {"reason": "not_enough", "num_requests": 0, "requests_needed": needed}
        return exact, {**_named(exact), **nothing, **report}
    paths = replayed_paths(domain, chains, settings)
    chosen, held_out = choose(paths, budget, confidence), backtest(paths, budget, confidence)
    report["held_out"] = held_out and {
        **_named(held_out.rule),
        "num_requests": held_out.num_requests,
        "divergence_share": held_out.divergence_share,
    }
    comparable = before.verifier in REPLAYABLE and before.similarity == as_set.similarity
    report["tokens_per_step_before"] = float(replay([before], chains).tokens_per_step[0]) if comparable else None
    return chosen.rule, {**_named(chosen.rule), **_without_rule(chosen), **report}


def _without_rule(chosen: Choice) -> dict[str, Any]:
    return {name: value for name, value in asdict(chosen).items() if name != "rule"}


def _named(rule: Rule) -> dict[str, Any]:
    return {"verifier": rule.verifier, "numbers": rule.numbers}


def _pooled(pooled: DomainCalibration) -> DomainCalibration:
    return DomainCalibration(pooled.thresholds, {"source": "pooled", "reason": COLD_START, "num_observations": 0})
