"""Recorded steps as the decoder reported them, request by request: the shape of real traffic, for load tests."""

from collections import defaultdict
from typing import Any

from sqlalchemy import select

from adaptive_spec.core import Position, Step
from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import StepRow

_SAME = (
    "request_id",
    "domain",
    "release",
    "step_index",
    "drafter",
    "chain_length",
    "num_accepted",
    "num_emitted",
    "explored",
    "draft_seconds",
    "verify_seconds",
    "batch_size",
    "at",
    "verifier",
    "num_divergent",
    "total_variation",
    "given_up_nats",
    "match_length",
    "request_temperature",
    "policy",
)


def recorded_requests(database: Database, limit: int = 20_000) -> list[list[Step]]:
    """Return the newest ``limit`` steps by request, each request's in their order; requests that began before may be
    cut short."""
    query = select(StepRow).order_by(StepRow.id.desc()).limit(limit)
    by_request: dict[str, list[Step]] = defaultdict(list)
    with database.session_scope(read_only=True) as session:
        for row in session.scalars(query):
            by_request[row.request_id].append(_step(row))
    return [sorted(steps, key=lambda step: step.step_index) for steps in by_request.values()]


def _step(row: Any) -> Step:
    flags = (index < row.num_reached_accepted for index in range(row.num_reached))
    reached = zip(row.confidences.tolist(), row.overlaps.tolist(), flags, strict=True)
    positions = tuple(Position(*position) for position in reached)
    return Step(positions=positions, **{name: getattr(row, name) for name in _SAME})
