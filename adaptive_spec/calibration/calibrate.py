"""Calibrate every domain at once: a scaling and length thresholds each, and pooled ones for the rest.

Everything is fitted twice.  What the earlier requests of a domain teach is judged on its later ones: the calibration
error and the goodput that are reported, and whether the domain's own numbers may replace the pooled ones.  What goes
live is fitted to all.  A domain's own numbers must show on later data that they are better; where they cannot, because
the domain is rare or no different, it keeps what all domains together taught.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.calibration.baselines import by_floors
from adaptive_spec.calibration.temperature import COLD_START, ScalingFit, check_calibration, fit_scaling
from adaptive_spec.calibration.threshold import MIN_REACHED, Replay, ThresholdReport, choose_threshold, goodput_interval
from adaptive_spec.core import POOLED, MatchAcceptance, Scaling, StepCost, Thresholds
from adaptive_spec.drafting.policy import threshold_floors
from adaptive_spec.records.observations import Observations, pool
from adaptive_spec.settings import CalibrationSettings

_NOTICED = 0.03  # of a log temperature, an offset, a rate
_SURE = 0.99  # that a domain's own lengths are better, to put them in place of the pooled ones
_BELIEF_CHAINS = 16  # that the pooled survival weighs beside a domain's own
OWN, OWN_SCALING, FROM_POOL, KEPT = "own", "own_scaling", "pooled", "kept"


@dataclass(frozen=True, slots=True)
class DomainCalibration:
    """One domain's new thresholds and the report that explains them, in JSON types.

    The report's ``source`` is own (all fitted here), own_scaling (the pooled lengths), pooled (the pooled scaling too)
    or kept (nothing could be fitted, the present thresholds stay).
    """

    thresholds: Thresholds
    report: dict[str, Any]

    @property
    def source(self) -> str:
        return str(self.report["source"])


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What some observations teach."""

    thresholds: Thresholds
    fit: ScalingFit
    report: ThresholdReport


class Calibrator:
    """Fits with one cost and one set of settings.

    warmth: what is believed of it where all recorded requests have the same temperature.
    """

    def __init__(
        self,
        costs: Mapping[int, StepCost],
        settings: CalibrationSettings,
        max_chain_length: int,
        warmth: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._costs = costs
        self._settings = settings
        self._longest = min(max_chain_length, len(costs[1].verify_seconds) - 1)
        self._warmth = warmth
        self._seed = seed

    def is_small(self, observed: Observations) -> bool:
        """Whether nothing can be fitted."""
        return len(observed.position) < self._settings.min_observations or observed.num_steps < MIN_REACHED

    def learn(self, observed: Observations, pooled: Thresholds | None = None) -> _Learnt:
        """Fit scaling and lengths; ``pooled`` is what a domain's own numbers are blended with."""
        fit = fit_scaling(observed, pooled.scaling if pooled else None, self._settings, self._warmth)
        thresholds, report = choose_threshold(observed, fit.scaling, self._costs, self._longest, self._seed)
        if pooled is not None:
            thresholds = replace(thresholds, survival=self._blended(thresholds.survival, observed, pooled.survival))
        return _Learnt(thresholds, fit, report)

    def domain(
        self, observed: Observations, now: Thresholds, pooled: _Learnt, earlier: _Learnt | None
    ) -> DomainCalibration:
        """Calibrate one domain.  pooled, earlier: what all domains, and their earlier requests, teach."""
        own = self.learn(observed, pooled.thresholds)
        later, source = self._judged(observed, now, earlier)
        thresholds = _combined(own.thresholds, pooled.thresholds, source)
        return DomainCalibration(thresholds, self._report(source, own, observed, now, thresholds, later))

    def pooled(
        self, observed: Observations, now: Thresholds, learnt: _Learnt, earlier: _Learnt | None, late: Observations
    ) -> DomainCalibration:
        """Calibrate all domains together.  late: the later requests of every domain."""
        later = None
        if earlier is not None and not self.is_small(late):
            later = self._later(late, {"now": now, "new": earlier.thresholds})
        return DomainCalibration(learnt.thresholds, self._report(OWN, learnt, observed, now, learnt.thresholds, later))

    def _judged(
        self, observed: Observations, now: Thresholds, pooled: _Learnt | None
    ) -> tuple[dict[str, Any] | None, str]:
        """What later requests say, and whose numbers the domain is to get."""
        early, late = observed.split(1 - self._settings.later_share)
        if pooled is None or self.is_small(early) or late.num_steps < MIN_REACHED or late.num_requests < 2:
            return None, FROM_POOL
        own = self.learn(early, pooled.thresholds).thresholds
        candidates = {source: _combined(own, pooled.thresholds, source) for source in (OWN, OWN_SCALING, FROM_POOL)}
        found = self._goodputs(late, candidates)
        low, _ = goodput_interval(found[OWN], found[FROM_POOL], seed=self._seed, confidence=_SURE)
        low_of_scaling, _ = goodput_interval(found[OWN_SCALING], found[FROM_POOL], seed=self._seed)
        source = FROM_POOL
        if low > 1:
            source = OWN
        elif low_of_scaling >= 1 - self._settings.tolerated_loss_share:
            source = OWN_SCALING
        return self._later(late, {"now": now, "new": candidates[source]}), source

    def _later(self, late: Observations, judged: Mapping[str, Thresholds]) -> dict[str, Any]:
        """Calibration errors and goodputs on later requests, of what is live and of what the earlier ones teach."""
        goodputs = self._goodputs(late, judged)
        low, high = goodput_interval(goodputs["new"], goodputs["now"], seed=self._seed)
        errors = {"uncalibrated": Scaling(), **{name: thresholds.scaling for name, thresholds in judged.items()}}
        return {
            "num_requests": late.num_requests,
            "num_observations": len(late.position),
            "num_by_position": np.bincount(late.position).tolist(),
            "calibration": {
                name: asdict(check_calibration(late, scaling, seed=self._seed)) for name, scaling in errors.items()
            },
            "goodput": {name: float(part[0].sum() / part[1].sum()) for name, part in goodputs.items()},
            "goodput_ratio": {"low": low, "high": high},
        }

    def _goodputs(self, late: Observations, judged: Mapping[str, Thresholds]) -> dict[str, NDArray[np.float64]]:
        replay = Replay.complete(late, Scaling(), self._longest, self._seed)
        return {
            name: replay.by_request(
                self._costs[1],
                by_floors(
                    replay.confidence,
                    chosen.scaling,
                    threshold_floors(chosen.lengths_at(1), self._longest),
                    replay.request_temperature,
                ).drafted,
            )
            for name, chosen in judged.items()
        }

    def _blended(
        self, survival: tuple[float, ...], observed: Observations, pooled: tuple[float, ...]
    ) -> tuple[float, ...]:
        """Survival by position, the pooled one weighing as much as a few chains."""
        weight, reached = _BELIEF_CHAINS, np.bincount(observed.position, minlength=len(survival))
        return tuple(
            (share * count + pooled[place] * weight) / (count + weight) if place < len(pooled) else share
            for place, (share, count) in enumerate(zip(survival, reached.tolist(), strict=False))
        )

    def _report(
        self,
        source: str,
        learnt: _Learnt,
        observed: Observations,
        now: Thresholds,
        thresholds: Thresholds,
        later: dict[str, Any] | None,
    ) -> dict[str, Any]:
        replay = Replay.complete(observed, now.scaling, self._longest, self._seed)
        return {
            "source": source,
            "reason": learnt.fit.reason,
            "num_observations": len(observed.position),
            "num_requests": observed.num_requests,
            "num_by_position": np.bincount(observed.position).tolist(),
            "old": _numbers(now),
            "new": _numbers(thresholds),
            "survival": list(thresholds.survival),
            "threshold": learnt.report.to_dict(),
            "goodput_now": replay.goodput(self._costs[1], now.stop_below, now.max_chain_length).goodput,
            "later": later,
        }


def calibrate(
    observations: Mapping[str, Observations],
    costs: Mapping[int, StepCost],
    settings: CalibrationSettings,
    max_chain_length: int,
    now: Mapping[str, Thresholds],
    seed: int = 0,
    ngram: Mapping[str, tuple[MatchAcceptance, ...]] | None = None,
) -> dict[str, DomainCalibration]:
    """Return a calibration for each domain observed or in ``now``, and for ``POOLED``.

    Args:
        observations: by domain, all of the live release; a ``POOLED`` key is ignored, pooling is done here.
        costs: of a step, by its rows; one row is among them.
        now: the thresholds that are live.
        ngram: how n-gram tokens fared, by domain.
    """
    matches = dict(ngram or {})
    now = {
        domain: now.get(domain) or now.get(POOLED) or Thresholds() for domain in {POOLED, *now, *observations, *matches}
    }
    found = _fitted(observations, costs, settings, max_chain_length, now, seed)
    return {domain: _carrying(result, now[domain], matches.get(domain)) for domain, result in found.items()}


def _fitted(
    observations: Mapping[str, Observations],
    costs: Mapping[int, StepCost],
    settings: CalibrationSettings,
    max_chain_length: int,
    now: Mapping[str, Thresholds],
    seed: int,
) -> dict[str, DomainCalibration]:
    """What the draft model's chains teach.  now: of every domain there is."""
    by_domain = {domain: observed for domain, observed in sorted(observations.items()) if domain != POOLED}
    everything = pool(list(by_domain.values()))
    calibrator = Calibrator(costs, settings, max_chain_length, now[POOLED].warmth, seed)
    if calibrator.is_small(everything):
        return {domain: _kept(domain, by_domain, thresholds) for domain, thresholds in sorted(now.items())}
    pooled = calibrator.learn(everything)
    splits = [part.split(1 - settings.later_share) for part in by_domain.values()]
    early, late = (pool([halves[side] for halves in splits]) for side in (0, 1))
    earlier = None if calibrator.is_small(early) else calibrator.learn(early)
    results = {POOLED: calibrator.pooled(everything, now[POOLED], pooled, earlier, late)}
    for domain in sorted(now.keys() - {POOLED}):
        observed = by_domain.get(domain)
        if observed is None or calibrator.is_small(observed):
            num = 0 if observed is None else len(observed.position)
            report = {"source": FROM_POOL, "reason": COLD_START, "num_observations": num}
            results[domain] = DomainCalibration(pooled.thresholds, report)
        else:
            results[domain] = calibrator.domain(observed, now[domain], pooled, earlier)
    return results


def alike(one: Thresholds, other: Thresholds) -> bool:
    """Whether a decoder would hardly notice the difference: then a swap costs more than it brings."""
    scalings = np.asarray([[math.log(each.temperature), each.offset, each.warmth] for each in (one, other)])
    curves = [*zip(one.survival, other.survival, strict=False), *_rates(one, other)]
    exactly = ("stop_below", "max_chain_length", "larger_batches", "rule", "sampling_temperature")
    return (
        all(getattr(one, name) == getattr(other, name) for name in exactly)
        and len(one.survival) == len(other.survival)
        and bool((np.abs(scalings[0] - scalings[1]) <= _NOTICED).all())
        and all(abs(a - b) <= _NOTICED for a, b in curves)
    )


def _rates(one: Thresholds, other: Thresholds) -> Iterator[tuple[float, float]]:
    """Acceptance of n-gram tokens by match length; a length that only one of them knows differs."""
    rates = [
        {seen.match_length: seen.num_accepted / max(1, seen.num_reached) for seen in each.ngram_acceptance}
        for each in (one, other)
    ]
    for length in rates[0].keys() | rates[1].keys():
        yield rates[0].get(length, math.inf), rates[1].get(length, math.inf)


def _carrying(
    result: DomainCalibration, now: Thresholds, ngram: tuple[MatchAcceptance, ...] | None
) -> DomainCalibration:
    """The result with what n-gram chains showed, and those of the present numbers that are not fitted here."""
    seen = now.ngram_acceptance if ngram is None else ngram
    thresholds = replace(
        result.thresholds,
        rule=now.rule,
        sampling_temperature=now.sampling_temperature,
        ngram_acceptance=seen,
    )
    rates = [asdict(entry) | {"rate": entry.num_accepted / max(1, entry.num_reached)} for entry in seen]
    return DomainCalibration(thresholds, result.report | {"ngram": rates})


def _combined(own: Thresholds, pooled: Thresholds, source: str) -> Thresholds:
    """The numbers of a source; how far chains live and what was counted are always the domain's own."""
    if source == OWN:
        return own
    lengths = {name: getattr(pooled, name) for name in ("stop_below", "max_chain_length", "larger_batches")}
    scaling = asdict(own.scaling if source == OWN_SCALING else pooled.scaling)
    return replace(own, **lengths, **scaling)


def _numbers(thresholds: Thresholds) -> dict[str, Any]:
    names = ("temperature", "offset", "warmth", "stop_below", "max_chain_length")
    batches = [asdict(rule) for rule in thresholds.larger_batches]
    return {**{name: getattr(thresholds, name) for name in names}, "larger_batches": batches}


def _kept(domain: str, by_domain: Mapping[str, Observations], now: Thresholds) -> DomainCalibration:
    num = sum(len(observed.position) for name, observed in by_domain.items() if domain in (name, POOLED))
    return DomainCalibration(now, {"source": KEPT, "reason": COLD_START, "num_observations": num})
