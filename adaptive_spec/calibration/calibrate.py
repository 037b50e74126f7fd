"""Calibrate every domain at once: one temperature and one set of thresholds each, and a pooled one for the rest."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from adaptive_spec.calibration.temperature import COLD_START, TemperatureFit, fit_temperature
from adaptive_spec.calibration.threshold import MIN_REACHED, Replay, choose_threshold
from adaptive_spec.core import POOLED, StepCost, Thresholds
from adaptive_spec.records.observations import Observations
from adaptive_spec.settings import CalibrationSettings


@dataclass(frozen=True, slots=True)
class DomainCalibration:
    """One domain's new thresholds and the report that explains them, in JSON types.

    The report's ``source`` is own (fitted here), pooled (too small, serves under the pooled thresholds) or kept
    (nothing could be fitted, the present thresholds stay).
    """

    thresholds: Thresholds
    report: dict[str, Any]


def calibrate(
    observations: Mapping[str, Observations],
    cost: StepCost,
    settings: CalibrationSettings,
    max_chain_length: int,
    now: Mapping[str, Thresholds],
    seed: int = 0,
) -> dict[str, DomainCalibration]:
    """Return a calibration for each domain observed or in ``now``, and for ``POOLED``.

    Args:
        observations: by domain, all of the live release; a ``POOLED`` key is ignored, pooling is done here.
        now: the thresholds that are live.
    """
    by_domain = {domain: observed for domain, observed in sorted(observations.items()) if domain != POOLED}
    pooled_observed = pool(list(by_domain.values()))
    if _is_small(pooled_observed, settings):
        return {domain: _kept(domain, by_domain, now) for domain in sorted({POOLED, *by_domain, *now})}
    fit = fit_temperature(pooled_observed.confidence, pooled_observed.accepted, None, settings)
    pooled = _own(pooled_observed, fit, cost, max_chain_length, now.get(POOLED), seed)
    results = {POOLED: pooled}
    for domain in sorted({*by_domain, *now} - {POOLED}):
        observed = by_domain.get(domain)
        if observed is None or _is_small(observed, settings):
            num = 0 if observed is None else len(observed.position)
            report = {"source": "pooled", "reason": COLD_START, "num_observations": num}
            results[domain] = DomainCalibration(pooled.thresholds, report)
            continue
        fit = fit_temperature(observed.confidence, observed.accepted, pooled.thresholds.temperature, settings)
        results[domain] = _own(observed, fit, cost, max_chain_length, now.get(domain), seed)
    return results


def _is_small(observed: Observations, settings: CalibrationSettings) -> bool:
    num_steps = int((observed.position == 0).sum())
    return len(observed.position) < settings.min_observations or num_steps < MIN_REACHED


def _own(
    observed: Observations,
    fit: TemperatureFit,
    cost: StepCost,
    max_chain_length: int,
    now: Thresholds | None,
    seed: int,
) -> DomainCalibration:
    thresholds, chosen = choose_threshold(observed, fit.temperature, cost, max_chain_length, seed)
    report = {
        "source": "own",
        "reason": fit.reason,
        "num_observations": fit.num_observations,
        "temperature": asdict(fit),
        "threshold": chosen.to_dict(),
    }
    if now is not None:
        longest = min(max_chain_length, len(cost.verify_seconds) - 1)
        replay = Replay.complete(observed, now.temperature, longest, seed)
        report["goodput_now"] = replay.goodput(cost, now.stop_below, now.max_chain_length).goodput
    return DomainCalibration(thresholds, report)


def _kept(domain: str, by_domain: Mapping[str, Observations], now: Mapping[str, Thresholds]) -> DomainCalibration:
    thresholds = now.get(domain) or now.get(POOLED) or Thresholds()
    num = sum(len(observed.position) for name, observed in by_domain.items() if domain in (name, POOLED))
    return DomainCalibration(thresholds, {"source": "kept", "reason": COLD_START, "num_observations": num})


def pool(parts: list[Observations]) -> Observations:
    """Join domains; requests of different domains stay different."""
    offsets = np.cumsum([0, *(int(part.request_index.max(initial=-1)) + 1 for part in parts)])
    requests = [part.request_index + offset for part, offset in zip(parts, offsets, strict=False)]

    def joined(name: str, dtype: type) -> Any:
        return np.concatenate([np.zeros(0, dtype), *(getattr(part, name) for part in parts)]).astype(dtype)

    return Observations(
        position=joined("position", np.int64),
        confidence=joined("confidence", np.float64),
        overlap=joined("overlap", np.float64),
        accepted=joined("accepted", np.bool_),
        request_index=np.concatenate([np.zeros(0, np.int64), *requests]),
        explored=joined("explored", np.bool_),
    )
