"""Traces: finished requests kept for distillation, as safetensors shards in a folder with a row per trace.

The writer adds, a training run loads.  A shard counts only once its rows are committed, and its file goes only after
they are gone; whatever a kill leaves behind is never read and is discarded later.  What is kept, and for how long, is
decided in ``quota`` and ``retention``.
"""

import logging
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from sqlalchemy import func, select

from adaptive_spec.core import Trace
from adaptive_spec.records.database import Database
from adaptive_spec.records.drops import Reason, count_drops
from adaptive_spec.records.quota import Quota, enforce
from adaptive_spec.records.screening import digest_of, is_degenerate, is_held_out
from adaptive_spec.records.shards import SUFFIX, UNFINISHED, Shard, read_shard, state_of, write_shard
from adaptive_spec.records.tables import TraceRow

logger = logging.getLogger(__name__)

_MOST_IDS = 10_000  # in one query
_READ_ATTEMPTS = 3  # of rows whose shard was rewritten between looking and reading


class TraceStore:
    """The traces of one service.

    Args:
        database: holds a row per trace.
        folder: holds the shards; made when missing.
        held_out_share: of the prompts, kept from training for the gate.
        quota: what each domain may have; None: no limit.
    """

    def __init__(self, database: Database, folder: Path, held_out_share: float, quota: Quota | None = None) -> None:
        self.database = database
        self.folder = Path(folder)
        self.held_out_share = held_out_share
        self.quota = quota
        self.num_stored: Counter[str] = Counter()  # by domain; this and the next: here, since this object was made
        self.num_dropped: Counter[tuple[str, Reason]] = Counter()  # by domain and reason
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, traces: Sequence[Trace]) -> int:
        """Store traces as one shard and return how many; loops and known ones are dropped, and so is what is over
        the quota then.  Traces of a request that is stored already are passed over, so that a retry is harmless.

        Raises:
            OSError: the disk refused.  Nothing is stored then.
            SQLAlchemyError: the database refused.  Nothing is stored then.
        """
        fresh, drops = self._sort_out(traces)
        shard = write_shard(self.folder, list(fresh.values())) if fresh else None
        rows = [] if shard is None else [self._row(shard, *entry) for entry in enumerate(fresh.items())]
        try:
            with self.database.session_scope() as session:
                self.database.insert_new(session, TraceRow, rows)
                if self.quota is not None:
                    for domain, held_out in sorted({(row["domain"], row["held_out"]) for row in rows}):
                        drops[domain, "quota"] += enforce(session, self.quota, domain, held_out=held_out)
                count_drops(self.database, session, drops)
        except BaseException:
            if shard is not None:
                (self.folder / shard.name).unlink(missing_ok=True)
            raise
        self.num_stored.update(row["domain"] for row in rows)
        self.num_dropped.update(drops)
        return len(rows)

    def load(
        self,
        *,
        held_out: bool | None = None,
        domains: list[str] | None = None,
        limit_per_domain: int | None = None,
    ) -> list[Trace]:
        """Return traces, oldest first.

        Args:
            held_out: True for the held-out ones, False for those to train on, None for both.
            domains: only these.
            limit_per_domain: only so many of each domain, the newest.
        """
        newest = func.row_number().over(partition_by=TraceRow.domain, order_by=TraceRow.id.desc()).label("newest")
        query = select(TraceRow.id, newest)
        if held_out is not None:
            query = query.where(TraceRow.held_out == held_out)
        if domains is not None:
            query = query.where(TraceRow.domain.in_(domains))
        ranked = query.subquery()
        wanted = select(TraceRow).join(ranked, TraceRow.id == ranked.c.id).order_by(TraceRow.id)
        if limit_per_domain is not None:
            wanted = wanted.where(ranked.c.newest <= limit_per_domain)
        with self.database.session_scope(read_only=True) as session:
            rows = list(session.scalars(wanted))
        found = self._read(rows)
        return [found[row.id] for row in rows if row.id in found]

    def count(self) -> dict[str, tuple[int, int]]:
        """Return per domain how many traces there are to train on, and how many are held out."""
        query = select(TraceRow.domain, TraceRow.held_out, func.count()).group_by(TraceRow.domain, TraceRow.held_out)
        counts: dict[str, tuple[int, int]] = {}
        with self.database.session_scope(read_only=True) as session:
            for domain, held_out, number in session.execute(query.order_by(TraceRow.domain)):
                train, tested = counts.get(domain, (0, 0))
                counts[domain] = (train, number) if held_out else (number, tested)
        return counts

    def known_requests(self, request_ids: Sequence[str]) -> set[str]:
        """Return those of the requests that have a trace."""
        with self.database.session_scope(read_only=True) as session:
            stored = set(session.scalars(select(TraceRow.request_id)))
        return stored.intersection(request_ids)

    def rewrite(self, shards: Sequence[str], without: Collection[int] = (), reason: Reason = "deleted") -> int:
        """Write what lives in shards anew as one, leave some of it out, and delete the old files.

        Rows change in one transaction.  A kill before it leaves the new shard without rows, one after it the old ones;
        either is an orphan.  Meanwhile the rows are locked, so that no one else moves or deletes them.

        Args:
            without: ids of rows that go, under ``reason``.

        Returns the bytes written.

        Raises:
            OSError: a shard cannot be read or written.  Nothing has changed then.
            SQLAlchemyError: the database refused.  Nothing has changed then.
        """
        without = frozenset(without)
        drops: Counter[tuple[str, Reason]] = Counter()
        kept: dict[int, Trace] = {}
        num_bytes = 0
        with self.database.session_scope() as session:
            rows = list(
                session.scalars(
                    select(TraceRow).where(TraceRow.shard.in_(shards)).order_by(TraceRow.id).with_for_update()
                )
            )
            leaving = [row for row in rows if row.id in without]
            drops.update((row.domain, reason) for row in leaving)
            for shard, members in _by_shard(row for row in rows if row.id not in without).items():
                try:
                    kept |= read_shard(self.folder / shard, members)
                except FileNotFoundError:
                    continue  # rows stay as they are; whether the file is lost is decided at the next start
                except SafetensorError as error:
                    logger.warning("%d traces are lost with %s: %s", len(members), self.folder / shard, error)
                    drops.update((row.domain, "damaged") for row in members)
                    leaving += members
            for row in leaving:
                session.delete(row)
            staying = [row for row in rows if row.id in kept]
            if staying:
                written = write_shard(self.folder, [kept[row.id] for row in staying])
                num_bytes = sum(written.trace_bytes)
                for place, row in enumerate(staying):
                    row.shard, row.place, row.num_bytes = written.name, place, written.trace_bytes[place]
                    row.tail_mass = float(kept[row.id].tail_mass.sum())
            count_drops(self.database, session, drops)
        self.num_dropped.update(drops)
        self.database.settle()  # rows that came back would miss their files
        for shard in shards:
            (self.folder / shard).unlink(missing_ok=True)
        return num_bytes

    def discard_orphans(self, min_age_seconds: float = 600.0) -> int:
        """Delete half-written shards and shards without rows, and return how many.

        Args:
            min_age_seconds: younger files stay: another process may be about to commit their rows.  Their age is told
                by the clock that dates them: this machine's may be off, or the folder another's.
        """
        newest = _now_in(self.folder) - min_age_seconds
        files = [path for path in self.folder.iterdir() if path.suffix in (SUFFIX, UNFINISHED)]
        with self.database.session_scope(read_only=True) as session:  # after the listing: rows come after files
            known = set(session.scalars(select(TraceRow.shard).distinct()))
        orphans = [path for path in files if path.name not in known and _modified(path) <= newest]
        for path in orphans:
            path.unlink(missing_ok=True)
        if orphans:
            logger.info("discarded %d trace shards without rows", len(orphans))
        return len(orphans)

    def discard_damaged(self) -> int:
        """Delete the rows of shards that are not whole or not there, and the files; return how many rows.

        When no shard at all is there the folder is the wrong one, or not mounted: then nothing is deleted.
        """
        ids: dict[str, list[int]] = defaultdict(list)
        with self.database.session_scope(read_only=True) as session:
            for row_id, shard in session.execute(select(TraceRow.id, TraceRow.shard)):
                ids[shard].append(row_id)
        states = {shard: state_of(self.folder / shard) for shard in sorted(ids)}
        if ids and set(states.values()) == {"missing"}:
            logger.warning("none of %d trace shards is in %s: is records.folder right?", len(ids), self.folder)
            return 0
        damaged = [shard for shard, state in states.items() if state != "whole"]
        for shard in damaged:
            logger.warning("%d traces are lost: %s is %s", len(ids[shard]), self.folder / shard, states[shard])
            self.rewrite([shard], ids[shard], "damaged")
        return sum(len(ids[shard]) for shard in damaged)

    def _sort_out(self, traces: Sequence[Trace]) -> tuple[dict[str, Trace], Counter[tuple[str, Reason]]]:
        """Return digest -> trace of those worth storing, and how many are not, by domain and reason."""
        drops: Counter[tuple[str, Reason]] = Counter()
        digests = [digest_of(trace) for trace in traces]
        with self.database.session_scope(read_only=True) as session:
            stored = select(TraceRow.digest, TraceRow.request_id).where(TraceRow.digest.in_(digests))
            known = {digest: request_id for digest, request_id in session.execute(stored)}
        fresh: dict[str, Trace] = {}
        for digest, trace in zip(digests, traces, strict=True):
            if is_degenerate(trace.tokens[trace.prompt_tokens :]):
                drops[trace.domain, "loop"] += 1
            elif digest not in known:
                fresh[digest] = trace
                known[digest] = trace.request_id
            elif known[digest] != trace.request_id:
                drops[trace.domain, "duplicate"] += 1
        return fresh, drops

    def _row(self, shard: Shard, place: int, entry: tuple[str, Trace]) -> dict[str, Any]:
        digest, trace = entry
        return {
            "digest": digest,
            "shard": shard.name,
            "place": place,
            "request_id": trace.request_id,
            "domain": trace.domain,
            "prompt_tokens": int(trace.prompt_tokens),
            "completion_tokens": len(trace.tokens) - int(trace.prompt_tokens),
            "release": int(trace.release),
            "held_out": is_held_out(trace.tokens, trace.prompt_tokens, self.held_out_share),
            "at": trace.at,
            "num_bytes": shard.trace_bytes[place],
            "tail_mass": float(trace.tail_mass.sum()),
        }

    def _read(self, rows: Sequence[TraceRow]) -> dict[int, Trace]:
        """Return the traces of rows that can be read, by the rows' ids."""
        found: dict[int, Trace] = {}
        for attempt in range(_READ_ATTEMPTS):
            moved: list[int] = []
            for shard, members in _by_shard(rows).items():
                try:
                    found |= read_shard(self.folder / shard, members)
                except (SafetensorError, OSError) as error:
                    if attempt + 1 < _READ_ATTEMPTS and isinstance(error, FileNotFoundError):
                        moved += [row.id for row in members]
                    else:
                        logger.warning("%d traces are passed over: %s: %s", len(members), self.folder / shard, error)
            if not moved:
                break
            rows = self._rows(moved)
        return found

    def _rows(self, ids: Sequence[int]) -> list[TraceRow]:
        with self.database.session_scope(read_only=True) as session:
            return [
                row
                for start in range(0, len(ids), _MOST_IDS)
                for row in session.scalars(select(TraceRow).where(TraceRow.id.in_(ids[start : start + _MOST_IDS])))
            ]


def _by_shard(rows: Any) -> dict[str, list[TraceRow]]:
    by_shard: dict[str, list[TraceRow]] = defaultdict(list)
    for row in rows:
        by_shard[row.shard].append(row)
    return by_shard


def _now_in(folder: Path) -> float:
    """The time by the clock that dates the files of a folder."""
    with tempfile.NamedTemporaryFile(prefix=".clock-", dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _modified(path: Path) -> float:
    """When a file was last written; infinitely late when it is gone meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")
