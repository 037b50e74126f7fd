"""Observations: reached positions as arrays, the material of calibration."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray
from sqlalchemy import select

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import StepRow


@dataclass(frozen=True, slots=True)
class Observations:
    """The reached positions of one domain, all arrays [positions] in the order of the steps.

    position: 0-based place in the chain.  confidence, overlap, accepted: as in ``core.Position``.
    request_index: numbers requests across the domains of one call, so that domains can be pooled by concatenation.
    explored: the step was drafted at full length regardless of the policy.
    """

    position: NDArray[numpy.int64]
    confidence: NDArray[numpy.float64]
    overlap: NDArray[numpy.float64]
    accepted: NDArray[numpy.bool_]
    request_index: NDArray[numpy.int64]
    explored: NDArray[numpy.bool_]


def observations(
    database: Database,
    *,
    release: int | None = None,
    domain: str | None = None,
    drafter: str = "model",
    limit: int = 200_000,
    after_step: int = 0,
) -> dict[str, Observations]:
    """Return observations per domain.

    Args:
        release: only of this release; confidences of different drafts do not mix.
        domain: only this one.
        drafter: only its chains; the confidences of model and n-gram do not mean the same.
        limit: the newest so many steps.
        after_step: only steps with a greater id.
    """
    columns = (
        StepRow.domain,
        StepRow.request_id,
        StepRow.num_reached,
        StepRow.num_reached_accepted,
        StepRow.confidences,
        StepRow.overlaps,
        StepRow.explored,
    )
    drafted = (StepRow.num_reached > 0, StepRow.drafter == drafter, StepRow.id > after_step)
    query = select(*columns).where(*drafted).order_by(StepRow.id.desc()).limit(limit)
    if release is not None:
        query = query.where(StepRow.release == release)
    if domain is not None:
        query = query.where(StepRow.domain == domain)
    with database.session_scope(read_only=True) as session:
        rows = session.execute(query).all()
    requests: dict[str, int] = {}
    by_domain: dict[str, list[Any]] = defaultdict(list)
    for row in reversed(rows):
        requests.setdefault(row.request_id, len(requests))
        by_domain[row.domain].append(row)
    return {name: _arrays(by_domain[name], requests) for name in sorted(by_domain)}


def _arrays(rows: list[Any], requests: dict[str, int]) -> Observations:
    reached = numpy.array([row.num_reached for row in rows])
    position = numpy.concatenate([numpy.arange(number) for number in reached])
    return Observations(
        position=position,
        confidence=numpy.concatenate([row.confidences for row in rows]).astype(numpy.float64),
        overlap=numpy.concatenate([row.overlaps for row in rows]).astype(numpy.float64),
        accepted=position < numpy.repeat([row.num_reached_accepted for row in rows], reached),
        request_index=numpy.repeat([requests[row.request_id] for row in rows], reached),
        explored=numpy.repeat([row.explored for row in rows], reached),
    )
