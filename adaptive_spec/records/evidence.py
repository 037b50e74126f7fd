"""Chains measured whole, as arrays: the material on which verifiers' thresholds are calibrated."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

import numpy
from numpy.typing import NDArray
from sqlalchemy import select

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import EvidenceRow, StepRow

_COLUMNS = (
    "request_id",
    "chain",
    "target_tokens",
    "strict",
    "measure",
    "similarities",
    "greedy",
    "temperature",
    "most_emitted",
)


@dataclass(frozen=True, slots=True)
class RecordedChains:
    """The measured chains of one domain, padded to the longest, in the order of the steps.

    chain, target_tokens: [chains, longest] int64; strict: [chains, longest] bool; similarities: [chains, longest]
    float32; greedy: [chains] bool; temperature: [chains] float64; all as in ``core.ChainEvidence``.
    lengths, most_emitted: [chains] int64.
    measure: [chains] str, of the similarities.
    request_index: [chains] int64, numbers the domain's requests in order of time.
    """

    chain: NDArray[numpy.int64]
    target_tokens: NDArray[numpy.int64]
    strict: NDArray[numpy.bool_]
    similarities: NDArray[numpy.float32]
    greedy: NDArray[numpy.bool_]
    temperature: NDArray[numpy.float64]
    lengths: NDArray[numpy.int64]
    most_emitted: NDArray[numpy.int64]
    measure: NDArray[numpy.str_]
    request_index: NDArray[numpy.int64]

    def __len__(self) -> int:
        return len(self.chain)

    def select(self, chosen: NDArray[numpy.bool_]) -> "RecordedChains":
        """Some of the chains; the requests that are left are numbered anew.  chosen: [chains]."""
        columns = {column.name: getattr(self, column.name)[chosen] for column in fields(self)}
        columns["request_index"] = numpy.unique(columns["request_index"], return_inverse=True)[1]
        return RecordedChains(**columns)


def recorded_chains(
    database: Database,
    *,
    releases: Collection[int] | None = None,
    domain: str | None = None,
    limit: int = 50_000,
    after_step: int = 0,
) -> dict[str, RecordedChains]:
    """Return what was measured, per domain.

    Args:
        releases: only of these; chains of different drafts do not mix.
        domain: only this one.
        limit: the newest so many chains.
        after_step: only what was measured after the step of this id.
    """
    columns = (EvidenceRow.domain, *(getattr(EvidenceRow, name) for name in _COLUMNS))
    query = select(*columns).order_by(EvidenceRow.id.desc()).limit(limit)
    if releases is not None:
        query = query.where(EvidenceRow.release.in_(list(releases)))
    if domain is not None:
        query = query.where(EvidenceRow.domain == domain)
    if after_step:
        query = query.where(EvidenceRow.at > select(StepRow.at).where(StepRow.id == after_step).scalar_subquery())
    with database.session_scope(read_only=True) as session:
        rows = session.execute(query).all()
    by_domain: dict[str, list[Any]] = defaultdict(list)
    for row in reversed(rows):
        by_domain[row.domain].append(row)
    return {name: _arrays(by_domain[name]) for name in sorted(by_domain)}


def _arrays(rows: list[Any]) -> RecordedChains:
    lengths = numpy.array([len(row.chain) for row in rows], dtype=numpy.int64)
    real = numpy.arange(max(1, lengths.max())) < lengths[:, None]

    def padded(name: str, dtype: Any) -> NDArray[Any]:
        values = numpy.zeros(real.shape, dtype)
        values[real] = numpy.concatenate([getattr(row, name) for row in rows])
        return values

    requests: dict[str, int] = {}
    return RecordedChains(
        chain=padded("chain", numpy.int64),
        target_tokens=padded("target_tokens", numpy.int64),
        strict=padded("strict", numpy.bool_),
        similarities=padded("similarities", numpy.float32),
        greedy=numpy.array([row.greedy for row in rows], dtype=numpy.bool_),
        temperature=numpy.array([row.temperature for row in rows], dtype=numpy.float64),
        lengths=lengths,
        most_emitted=numpy.array([row.most_emitted for row in rows], dtype=numpy.int64),
        measure=numpy.array([row.measure for row in rows]),
        request_index=numpy.array([requests.setdefault(row.request_id, len(requests)) for row in rows]),
    )
