"""The domains that traffic has shown so far."""

from sqlalchemy import select, union

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import RequestRow, StepRow, TraceRow


def list_domains(database: Database) -> list[str]:
    """Return every domain with a request, a step or a trace, sorted."""
    query = union(select(RequestRow.domain), select(StepRow.domain), select(TraceRow.domain))
    with database.session_scope(read_only=True) as session:
        return sorted(session.scalars(query))
