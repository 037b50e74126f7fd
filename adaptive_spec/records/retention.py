"""How long traces are kept: by age, by size, on demand; and their files, kept free of what no row names any more.

The writer's thread sweeps now and then; every sweep does a bounded part of the work and the next goes on where it
ended, for what is due is read off rows and files each time.  Somebody's wish to be forgotten is done at once.
"""

import itertools
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, delete, func, or_, select

from adaptive_spec.records.database import Database
from adaptive_spec.records.drops import Reason
from adaptive_spec.records.tables import EvidenceRow, TraceRow
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import RecordSettings

logger = logging.getLogger(__name__)

_SWEEP_BYTES = 128_000_000  # written anew in one sweep
_SHARD_BYTES = 16_000_000  # of a shard that is made of several
_SMALL_BYTES = 1_000_000  # shards below are merged, once there are so many:
_SMALL_SHARDS = 16
_LIVE_SHARE = 0.75  # of a file's bytes, below which it is written anew without the rest
_SIZE_MARGIN = 0.05  # of the size limit, freed beyond it, so that not every sweep has to


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was stored of a request, and is gone."""

    request_id: str
    num_traces: int
    num_evidence: int


@dataclass(frozen=True, slots=True)
class _Weighed:
    """What choosing looks at in a trace."""

    id: int
    shard: str
    held_out: bool
    num_bytes: int


class Retention:
    """Keeps a store within its limits.

    Args:
        settings: the limits: ``trace_days``, ``trace_bytes``, ``min_held_out_traces``.
        stopped: whether to leave the rest of a sweep to the next one.
    """

    def __init__(
        self, store: TraceStore, settings: RecordSettings, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        self._store = store
        self._settings = settings
        self._stopped = stopped

    def recover(self) -> None:
        """Discard what an earlier life left half-done, and rows whose shards are damaged.

        Raises:
            SQLAlchemyError: the database does not answer.
            OSError: the folder cannot be read or written.
        """
        self._store.discard_orphans()
        self._store.discard_damaged()

    def sweep(self, now: datetime | None = None) -> None:
        """Do a bounded part of what is due: old traces, those over the size limit, files that hold too little.

        A shard that cannot be read or written is left to the next sweep and holds up no other.

        Raises:
            SQLAlchemyError: the database does not answer.
            OSError: the folder cannot be read.
        """
        self._store.discard_orphans()
        left = _SWEEP_BYTES
        for work in itertools.chain(self._expired(now or datetime.now(UTC)), self._displaced(), self._loose()):
            if left <= 0 or self._stopped():
                return
            shards, ids, reason = work
            try:
                left -= self._store.rewrite(shards, ids, reason)
            except OSError as error:
                logger.warning("%s cannot be rewritten now: %s", ", ".join(shards), error)

    def _expired(self, now: datetime) -> Iterator[tuple[Sequence[str], Sequence[int], Reason]]:
        if not self._settings.trace_days:
            return
        oldest = now - timedelta(days=self._settings.trace_days)
        for shard, ids in _ids_by_shard(self._store.database, TraceRow.at < oldest).items():
            yield [shard], ids, "age"

    def _displaced(self) -> Iterator[tuple[Sequence[str], Sequence[int], Reason]]:
        limit = self._settings.trace_bytes
        sizes = self._sizes()
        if not limit or sum(sizes.values()) <= limit:
            return
        allowed = fair_share(sizes, round(limit * (1 - _SIZE_MARGIN)))
        by_shard: dict[str, list[int]] = defaultdict(list)
        for domain, size in sizes.items():
            for trace in surplus(self._weigh(domain), size - allowed, self._settings.min_held_out_traces):
                by_shard[trace.shard].append(trace.id)
        for shard in sorted(by_shard):  # their names begin with the time
            yield [shard], by_shard[shard], "size"

    def _loose(self) -> Iterator[tuple[Sequence[str], Sequence[int], Reason]]:
        """Shards that hold much that no row names, and small ones that can be merged."""
        live = self._live_bytes()
        files = {shard: size for shard in live if (size := self._file_bytes(shard)) is not None}
        limit = self._settings.trace_bytes
        crowded = bool(limit) and sum(files.values()) > limit
        share = 1.0 if crowded else _LIVE_SHARE
        wasteful = [shard for shard, size in files.items() if live[shard] < share * size]
        small = [shard for shard, size in files.items() if size < _SMALL_BYTES]
        due = sorted({*wasteful, *(small if len(small) >= _SMALL_SHARDS else ())})
        for group in _groups(due, live):
            yield group, (), "quota"

    def _sizes(self) -> dict[str, int]:
        return self._sums(TraceRow.domain)

    def _live_bytes(self) -> dict[str, int]:
        return self._sums(TraceRow.shard)

    def _sums(self, column: Any) -> dict[str, int]:
        """Bytes of traces by domain or by shard.  Those of traces that were never weighed count as none."""
        query = select(column, func.coalesce(func.sum(TraceRow.num_bytes), 0)).group_by(column)
        with self._store.database.session_scope(read_only=True) as session:
            return {name: int(size) for name, size in session.execute(query)}

    def _weigh(self, domain: str) -> list[_Weighed]:
        """The traces of a domain, oldest first."""
        columns = (TraceRow.id, TraceRow.shard, TraceRow.held_out, func.coalesce(TraceRow.num_bytes, 0))
        query = select(*columns).where(TraceRow.domain == domain).order_by(TraceRow.id)
        with self._store.database.session_scope(read_only=True) as session:
            return [_Weighed(*row) for row in session.execute(query)]

    def _file_bytes(self, shard: str) -> int | None:
        try:
            return (self._store.folder / shard).stat().st_size
        except FileNotFoundError:
            return None


def forget_request(store: TraceStore, request_id: str) -> Forgotten:
    """Delete what is stored of a request's text, its choices ``ID-0``, ``ID-1``, … included: traces and evidence.

    Rows and bytes are gone when this returns.  Statistics stay: they hold no tokens.

    Raises:
        OSError: a shard cannot be rewritten.
        SQLAlchemyError: the database does not answer.
    """
    forgotten: set[int] = set()
    ids = _ids_of(store.database, TraceRow, request_id)
    while found := _ids_by_shard(store.database, TraceRow.request_id.in_(ids)):  # a sweep may move them meanwhile
        for shard, rows in found.items():
            store.rewrite([shard], rows, "deleted")
            forgotten.update(rows)
    chains = _ids_of(store.database, EvidenceRow, request_id)
    with store.database.session_scope() as session:
        num_evidence = session.scalar(select(func.count()).where(EvidenceRow.request_id.in_(chains))) or 0
        session.execute(delete(EvidenceRow).where(EvidenceRow.request_id.in_(chains)))
    store.database.settle(scrub=True)
    return Forgotten(request_id, len(forgotten), num_evidence)


def fair_share(sizes: dict[str, int], limit: int) -> int:
    """The most that each may have so that all together keep the limit, and what one leaves the others may use.

    Who has less than ``limit / len(sizes)`` always stays below it: nobody can displace those who take little.
    """
    left = limit
    for index, size in enumerate(ordered := sorted(sizes.values())):
        share = left // (len(ordered) - index)
        if size > share:
            return share
        left -= size
    return limit


def surplus(traces: Sequence[_Weighed], num_bytes: int, min_held_out: int) -> list[_Weighed]:
    """Choose traces of at least so many bytes, the oldest; the newest held-out ones only after all others.

    A domain without held-out traces cannot be judged, and so never gets another release; without training traces it
    only waits for the next ones.
    """
    if num_bytes <= 0:
        return []
    spared = {trace.id for trace in [trace for trace in traces if trace.held_out][::-1][:min_held_out]}
    chosen, total = [], 0
    for trace in sorted(traces, key=lambda trace: (trace.id in spared, trace.id)):
        if total >= num_bytes:
            break
        chosen.append(trace)
        total += trace.num_bytes
    return chosen


def _ids_of(database: Database, table: type[TraceRow] | type[EvidenceRow], request_id: str) -> list[str]:
    """The ids under which a table knows a request and its choices."""
    named = or_(table.request_id == request_id, table.request_id.startswith(f"{request_id}-", autoescape=True))
    choice = re.compile(rf"{re.escape(request_id)}(-\d{{1,4}})?")
    with database.session_scope(read_only=True) as session:
        found = session.scalars(select(table.request_id).where(named).distinct())
        return [name for name in found if choice.fullmatch(name)]


def _ids_by_shard(database: Database, condition: ColumnElement[bool]) -> dict[str, list[int]]:
    """Ids of rows, by shard, the oldest shard first."""
    found: dict[str, list[int]] = defaultdict(list)
    query = select(TraceRow.id, TraceRow.shard).where(condition).order_by(TraceRow.shard, TraceRow.id)
    with database.session_scope(read_only=True) as session:
        for row_id, shard in session.execute(query):
            found[shard].append(row_id)
    return dict(found)


def _groups(shards: Sequence[str], live: dict[str, int]) -> Iterator[list[str]]:
    """Cut shards, in order, into groups that make one of at most ``_SHARD_BYTES`` each."""
    group: list[str] = []
    for shard in shards:
        if group and sum(live[name] for name in group) + live[shard] > _SHARD_BYTES:
            yield group
            group = []
        group.append(shard)
    if group:
        yield group
