"""Which jobs of the schedule are due.  The scheduler of the process that leads asks.

The answer is a row, not a timer: when the lead changes hands, or two believe for a moment that they have it, a job is
still begun once per interval.
"""

from datetime import timedelta

from sqlalchemy import update

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import JobRow


def claim_job(database: Database, name: str, every: timedelta) -> bool:
    """Return whether the job is due, and count it as begun if so.

    The first interval begins when a job is first asked for; then the intervals go on across restarts.
    """
    with database.session_scope() as session:
        now = database.clock(session)
        database.insert_new(session, JobRow, [{"name": name, "begun_at": now}])
        due = update(JobRow).where(JobRow.name == name, JobRow.begun_at <= now - every).values(begun_at=now)
        return session.scalar(due.returning(JobRow.name)) is not None
