"""``adaptive-spec risk``: how often rules calibrated on recorded traffic exceed their budget.  It only reads.

Requests on record are drawn with replacement into a half to calibrate on and a half to look at, many times.  Both
halves then come from one traffic, so that what is tested is the calibration and not whether traffic changes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from adaptive_spec.calibration.risk import Replayed, choose, share_of
from adaptive_spec.calibration.rules import replayed_paths, serving
from adaptive_spec.core import Release
from adaptive_spec.errors import NotEnoughDataError
from adaptive_spec.records.calibrations import thresholds_of
from adaptive_spec.records.database import Database
from adaptive_spec.records.evidence import recorded_chains
from adaptive_spec.records.releases import list_releases, live_version, same_draft
from adaptive_spec.settings import Settings

NUM_SAMPLES = 200
_QUIET_SECONDS = 2.0  # before progress is told


@dataclass(frozen=True, slots=True)
class DomainRisk:
    """What came of one domain's resamplings; shares are of them unless they are of tokens.

    exceeded_share: the rule's divergence share on the other half was above the budget.  expected_exceeded_share: on all
    requests on record, from which both halves are drawn, it is; calibration promises at most ``allowed_share`` of that.
    relaxed_share: something but exact was chosen.  divergence_share: of tokens, mean over the other halves.
    """

    domain: str
    budget: float
    allowed_share: float
    num_requests: int
    num_chains: int
    num_samples: int
    exceeded_share: float
    expected_exceeded_share: float
    relaxed_share: float
    divergence_share: float
    tokens_per_step: float
    tokens_per_step_exact: float

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return asdict(self)


def recorded_risk(
    database: Database,
    settings: Settings,
    *,
    domain: str | None = None,
    release: int | None = None,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
    tell: Callable[[str, str], None] = lambda title, text: None,
) -> list[DomainRisk]:
    """Resample every domain whose verifier is calibrated.

    Args:
        release: whose draft and thresholds; None: the live one.
        tell: called with a domain and how far it is, once it takes long.

    Raises:
        NotEnoughDataError: no such domain has two requests with measured chains.
    """
    version = live_version(database) if release is None else release
    parents = {record.version: record.parent for record in list_releases(database)}
    served = Release(version, thresholds_of(database, version, parents))
    found: list[DomainRisk] = []
    began = time.monotonic()
    for name, recorded in recorded_chains(database, releases=same_draft(database, version), domain=domain).items():
        chains = serving(name, recorded, served.for_domain(name), settings.verification)
        paths = replayed_paths(name, chains, settings.verification) if len(chains) else []
        if not paths or paths[0].num_requests < 2:
            continue

        def told(sample: int, name: str = name) -> None:
            if time.monotonic() - began > _QUIET_SECONDS:
                tell(name, f"{sample} of {num_samples} resamplings")

        budget, confidence = settings.verification.budget(name), settings.verification.budget_confidence
        samples = resample(paths, budget, confidence, num_samples, seed, told)
        found.append(_summary(name, paths, len(chains), samples, budget, confidence))
    if not found:
        raise NotEnoughDataError(
            f"No domain has two requests whose chains were measured under the draft of release {version}. Serve with a "
            "relaxed verifier set or allowed (verification.verifier, verification.allowed) and "
            "verification.evidence_share above 0."
        )
    return found


@dataclass(frozen=True, slots=True)
class Sample:
    """One resampling: the rule's divergence share on the other half and on all requests, and whether it is relaxed."""

    divergence_share: float
    expected_share: float
    tokens_per_step: float
    relaxed: bool


def resample(
    paths: Sequence[Replayed],
    budget: float,
    confidence: float,
    num_samples: int,
    seed: int,
    tell: Callable[[int], None] = lambda sample: None,
) -> list[Sample]:
    """Calibrate on one half and look at the other, so many times."""
    random, count = np.random.default_rng(seed), paths[0].num_requests
    found = []
    for sample in range(num_samples):
        tell(sample)
        drawn = random.integers(0, count, count)
        rule = choose([its.take(drawn[: count // 2]) for its in paths], budget, confidence).rule
        others = [its.take(drawn[count // 2 :]) for its in paths]
        chosen = next(its for its in others if rule in its.rules)
        found.append(
            Sample(
                share_of(rule, others),
                share_of(rule, paths),
                float(chosen.tokens_per_step[chosen.rules.index(rule)]),
                rule.verifier != "exact",
            )
        )
    return found


def _summary(
    domain: str, paths: Sequence[Replayed], num_chains: int, samples: list[Sample], budget: float, confidence: float
) -> DomainRisk:
    def mean(values: Sequence[float]) -> float:
        return float(np.mean(values))

    return DomainRisk(
        domain=domain,
        budget=budget,
        allowed_share=1 - confidence,
        num_requests=paths[0].num_requests,
        num_chains=num_chains,
        num_samples=len(samples),
        exceeded_share=mean([sample.divergence_share > budget for sample in samples]),
        expected_exceeded_share=mean([sample.expected_share > budget for sample in samples]),
        relaxed_share=mean([sample.relaxed for sample in samples]),
        divergence_share=mean([sample.divergence_share for sample in samples]),
        tokens_per_step=mean([sample.tokens_per_step for sample in samples]),
        tokens_per_step_exact=float(paths[0].tokens_per_step[0]),
    )
