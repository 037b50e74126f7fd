"""Why traces were not kept, or not any longer: a counter per domain and reason, in the same transaction as the deed."""

from collections.abc import Mapping
from typing import Literal

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import TraceDropRow

Reason = Literal[
    "duplicate",  # the same prompt and completion are stored
    "loop",  # the completion ends in one
    "quota",  # the domain has newer ones, and its sample of older ones is full
    "age",
    "size",  # all traces together were too large
    "deleted",  # somebody asked for it
    "damaged",  # the shard is not whole or not there
]


def count_drops(database: Database, session: Session, drops: Mapping[tuple[str, Reason], int]) -> None:
    """Add to the counters.

    Args:
        drops: (domain, reason) -> traces.
    """
    rows = [  # in one order everywhere, so that two processes wait for each other instead of locking up
        {"domain": domain, "reason": reason, "num_traces": number}
        for (domain, reason), number in sorted(drops.items())
        if number
    ]
    if not rows:
        return
    insert = (sqlite.insert if database.is_sqlite else postgresql.insert)(TraceDropRow).values(rows)
    more = {"num_traces": TraceDropRow.num_traces + insert.excluded.num_traces}
    session.execute(insert.on_conflict_do_update(index_elements=["domain", "reason"], set_=more))
