"""What the trace store holds, per domain, and what it dropped."""

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import case, func, select

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import TraceDropRow, TraceRow


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """The traces of one domain.

    num_tokens: of prompts and completions; num_completion_tokens: those with the target's distribution.
    bytes_per_token: of the shards, per completion token.
    kept_mass: mean probability, per completion token, that the stored top-K hold; the rest is in the tail.
    dropped: reason -> traces, since the beginning.
    A number is None where nothing is there to count.
    """

    domain: str
    num_traces: int
    num_held_out: int
    held_out_share: float | None
    num_tokens: int
    num_completion_tokens: int
    num_bytes: int
    bytes_per_token: float | None
    kept_mass: float | None
    dropped: dict[str, int]
    oldest: datetime | None
    newest: datetime | None


def trace_statistics(database: Database, *, domain: str | None = None) -> list[TraceStatistics]:
    """Return the statistics of every domain that has traces or had some dropped, sorted.

    Args:
        domain: only this one.
    """
    weighed = case((TraceRow.tail_mass.is_not(None), TraceRow.completion_tokens), else_=0)
    query = select(
        TraceRow.domain,
        func.count().label("traces"),
        func.sum(case((TraceRow.held_out, 1), else_=0)).label("held_out"),
        func.sum(TraceRow.prompt_tokens).label("prompt"),
        func.sum(TraceRow.completion_tokens).label("completion"),
        func.coalesce(func.sum(TraceRow.num_bytes), 0).label("bytes"),
        func.sum(TraceRow.tail_mass).label("tail"),
        func.sum(weighed).label("weighed"),
        func.min(TraceRow.at).label("oldest"),
        func.max(TraceRow.at).label("newest"),
    ).group_by(TraceRow.domain)
    drops = select(TraceDropRow)
    if domain is not None:
        query, drops = query.where(TraceRow.domain == domain), drops.where(TraceDropRow.domain == domain)
    dropped: dict[str, dict[str, int]] = defaultdict(dict)
    with database.session_scope(read_only=True) as session:
        for drop in session.scalars(drops.order_by(TraceDropRow.reason)):
            dropped[drop.domain][drop.reason] = drop.num_traces
        rows = {row.domain: row for row in session.execute(query)}
    found = []
    for name in sorted(set(rows) | set(dropped)):
        row = rows.get(name)
        if row is None:
            found.append(TraceStatistics(name, 0, 0, None, 0, 0, 0, None, None, dropped[name], None, None))
            continue
        completion, measured = int(row.completion), int(row.weighed)
        found.append(
            TraceStatistics(
                domain=name,
                num_traces=row.traces,
                num_held_out=int(row.held_out),
                held_out_share=row.held_out / row.traces,
                num_tokens=int(row.prompt) + completion,
                num_completion_tokens=completion,
                num_bytes=int(row.bytes),
                bytes_per_token=int(row.bytes) / measured if measured else None,
                kept_mass=1.0 - row.tail / measured if measured else None,
                dropped=dropped.get(name, {}),
                oldest=row.oldest,
                newest=row.newest,
            )
        )
    return found
