"""The domains that traffic has shown so far."""

from sqlalchemy import select, union

from adaptive_spec.records.database import Database
from adaptive_spec.records.spans import window
from adaptive_spec.records.tables import RequestRollupRow, RequestRow, StepRollupRow, StepRow, TraceRow


def list_domains(database: Database) -> list[str]:
    """Return every domain that ever had a request or a step, or has a trace, sorted."""
    with database.session_scope(read_only=True) as session:
        seen = window(session, None)
        rolled_up = [select(table.domain).where(seen.rolled_up(table)) for table in (StepRollupRow, RequestRollupRow)]
        raw = [
            select(RequestRow.domain).where(~RequestRow.rolled_up),
            select(StepRow.domain).where(StepRow.id > seen.last_step),
            select(TraceRow.domain),
        ]
        return sorted(session.scalars(union(*raw, *rolled_up)))
