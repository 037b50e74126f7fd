"""What steps cost, by what that is valid for: hardware, models, dtype, threads.  Called by the service."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import CostRow


@dataclass(frozen=True, slots=True)
class CostRecord:
    """A cost model as JSON, and when it was last measured or brought up to date."""

    model: dict[str, Any]
    measured_at: datetime


def save_cost(database: Database, key: str, model: dict[str, Any]) -> None:
    """Store a model under its key; the one before is replaced."""
    with database.session_scope() as session:
        session.merge(CostRow(key=key, model=model, measured_at=datetime.now(UTC)))


def get_cost(database: Database, key: str) -> CostRecord | None:
    """Return the model of exactly this key, None when there is none."""
    with database.session_scope(read_only=True) as session:
        row = session.get(CostRow, key)
        return None if row is None else CostRecord(row.model, row.measured_at)


def list_costs(database: Database) -> dict[str, CostRecord]:
    """Return every stored model by its key, the newest first."""
    query = select(CostRow).order_by(CostRow.measured_at.desc(), CostRow.key)
    with database.session_scope(read_only=True) as session:
        return {row.key: CostRecord(row.model, row.measured_at) for row in session.scalars(query)}
