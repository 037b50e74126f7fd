"""Observations: reached positions as arrays, the material of calibration."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy
from numpy.typing import NDArray
from sqlalchemy import func, select

from adaptive_spec.core import MatchAcceptance
from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import StepRow


@dataclass(frozen=True, slots=True)
class Observations:
    """The reached positions of one domain, all arrays [positions] in the order of the steps.

    position: 0-based place in the chain.  confidence, overlap, accepted: as in ``core.Position``.
    request_index: numbers requests across the domains of one call, so that domains can be pooled by concatenation.
    explored: the step was drafted at full length regardless of the policy.  request_temperature: 0 is greedy.
    """

    position: NDArray[numpy.int64]
    confidence: NDArray[numpy.float64]
    overlap: NDArray[numpy.float64]
    accepted: NDArray[numpy.bool_]
    request_index: NDArray[numpy.int64]
    explored: NDArray[numpy.bool_]
    request_temperature: NDArray[numpy.float64]

    @property
    def num_requests(self) -> int:
        return len(numpy.unique(self.request_index))

    @property
    def num_steps(self) -> int:
        return int((self.position == 0).sum())

    def only(self, chosen: NDArray[numpy.bool_]) -> "Observations":
        """Some of them; chosen: [positions]."""
        return Observations(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})

    def split(self, share: float) -> tuple["Observations", "Observations"]:
        """The first ``share`` of the requests, in the order of their numbers, and the rest."""
        requests = numpy.unique(self.request_index)
        earlier = numpy.isin(self.request_index, requests[: round(share * len(requests))])
        return self.only(earlier), self.only(~earlier)


def pool(parts: Sequence[Observations]) -> Observations:
    """Join domains; requests of different domains stay different."""
    offsets = numpy.cumsum([0, *(int(part.request_index.max(initial=-1)) + 1 for part in parts)])
    requests = [part.request_index + offset for part, offset in zip(parts, offsets, strict=False)]

    def joined(name: str, dtype: type) -> Any:
        return numpy.concatenate([numpy.zeros(0, dtype), *(getattr(part, name) for part in parts)]).astype(dtype)

    return Observations(
        position=joined("position", numpy.int64),
        confidence=joined("confidence", numpy.float64),
        overlap=joined("overlap", numpy.float64),
        accepted=joined("accepted", numpy.bool_),
        request_index=numpy.concatenate([numpy.zeros(0, numpy.int64), *requests]),
        explored=joined("explored", numpy.bool_),
        request_temperature=joined("request_temperature", numpy.float64),
    )


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
        StepRow.request_temperature,
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


def ngram_acceptance(database: Database, limit: int = 200_000) -> dict[str, tuple[MatchAcceptance, ...]]:
    """Return by domain how n-gram tokens fared, by match length, in the newest ``limit`` steps; any release's."""
    matched = (StepRow.drafter == "ngram", StepRow.match_length > 0, StepRow.num_reached > 0)
    columns = (StepRow.domain, StepRow.match_length, StepRow.num_reached_accepted, StepRow.num_reached)
    newest = select(*columns).where(*matched).order_by(StepRow.id.desc()).limit(limit).subquery()
    key = (newest.c.domain, newest.c.match_length)
    sums = (func.sum(newest.c.num_reached_accepted), func.sum(newest.c.num_reached))
    found: dict[str, list[MatchAcceptance]] = defaultdict(list)
    with database.session_scope(read_only=True) as session:
        for domain, length, accepted, reached in session.execute(select(*key, *sums).group_by(*key).order_by(*key)):
            found[domain].append(MatchAcceptance(int(length), int(accepted), int(reached)))
    return {domain: tuple(counts) for domain, counts in found.items()}


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
        request_temperature=numpy.repeat([float(row.request_temperature) for row in rows], reached),
    )
