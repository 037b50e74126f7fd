"""The verifier's rule of each domain: what its evidence certifies under its divergence budget, else exact.

Called by the pipeline, after thresholds of drafting have been fitted.  The operator decides which verifiers and which
budget (``settings.verification``); this room only finds numbers within that.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.calibration.calibrate import DomainCalibration
from adaptive_spec.calibration.risk import REPLAYABLE, Choice, Replayed, backtest, choose, path, replay
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

    A domain where no verifier is to be calibrated keeps the rule that it has, and so does ``POOLED``: a rule is
    certified for one domain's traffic.  The report's ``rule`` says what was decided and why.

    Args:
        evidence: by domain, of the draft that the calibrations are for.
        now: the thresholds that are live.
    """
    found: dict[str, DomainCalibration] = {}
    for domain in sorted({*calibrations, *evidence}):
        made = calibrations.get(domain) or _pooled(calibrations[POOLED])
        live = (now.get(domain) or now.get(POOLED) or Thresholds()).rule
        if domain == POOLED or not settings.calibrated(domain):
            found[domain] = replace(made, thresholds=replace(made.thresholds, rule=live))
            continue
        rule, report = _calibrated(domain, evidence.get(domain), made.thresholds, settings, live)
        found[domain] = DomainCalibration(replace(made.thresholds, rule=rule), {**made.report, "rule": report})
    return found


def paths_of(
    domain: str, recorded: RecordedChains, thresholds: Thresholds, settings: VerificationSettings
) -> list[Replayed]:
    """What every rule that may be chosen would have made of a domain's chains; none where none of them serves.

    Args:
        thresholds: similarities count that were measured at the temperatures of these.
    """
    serving = recorded.select(_serving(domain, recorded, thresholds, settings))
    if not len(serving):
        return []
    return [replay(path(name, settings.rule(domain)), serving) for name in settings.calibrated(domain)]


def _serving(
    domain: str, recorded: RecordedChains, thresholds: Thresholds, settings: VerificationSettings
) -> NDArray[np.bool_]:
    """Which chains were compared as the domain's rules would compare them: [chains]."""
    if settings.calibrated(domain) == ("ngram",):
        return np.ones(len(recorded), np.bool_)
    width = recorded.chain.shape[1]
    apart = recorded.temperatures / np.array(thresholds.temperatures(width), np.float32)
    beyond = np.arange(width) >= recorded.lengths[:, None]
    near = (abs(apart - 1) <= _SAME_TEMPERATURE) | beyond
    return near.all(-1) & (recorded.measure == settings.rule(domain).similarity)


def _calibrated(
    domain: str,
    recorded: RecordedChains | None,
    thresholds: Thresholds,
    settings: VerificationSettings,
    live: Rule | None,
) -> tuple[Rule, dict[str, Any]]:
    """The rule and its report, in JSON types."""
    budget, confidence = settings.budget(domain), settings.budget_confidence
    before = settings.choice(domain, live)
    paths = [] if recorded is None else paths_of(domain, recorded, thresholds, settings)
    report: dict[str, Any] = {"budget": budget, "confidence": confidence, "before": _named(before)}
    if not paths:
        exact = replace(settings.rule(domain), verifier="exact")
        return exact, {**_named(exact), "reason": "not_enough", "num_requests": 0, **report}
    chosen, held_out = choose(paths, budget, confidence), backtest(paths, budget, confidence)
    report["held_out"] = held_out and {
        **_named(held_out.rule),
        "num_requests": held_out.num_requests,
        "divergence_share": held_out.divergence_share,
    }
    report["tokens_per_step_before"] = _tokens_per_step(before, paths)
    return chosen.rule, {**_named(chosen.rule), **_without_rule(chosen), **report}


def _tokens_per_step(rule: Rule, paths: list[Replayed]) -> float | None:
    for replayed in paths:
        if rule.verifier == "exact":
            return float(replayed.tokens_per_step[0])
        if rule in replayed.rules:
            return float(replayed.tokens_per_step[replayed.rules.index(rule)])
    return None


def _without_rule(chosen: Choice) -> dict[str, Any]:
    return {name: value for name, value in asdict(chosen).items() if name != "rule"}


def _named(rule: Rule) -> dict[str, Any]:
    return {"verifier": rule.verifier, "numbers": rule.numbers}


def _pooled(pooled: DomainCalibration) -> DomainCalibration:
    return DomainCalibration(
        pooled.thresholds, {"source": "pooled", "reason": COLD_START, "num_observations": 0}
    )
