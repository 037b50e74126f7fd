"""Traces: finished requests kept for distillation, as safetensors shards in a folder with a row per trace.

The writer adds, a training run loads.  A shard appears under its final name only when every byte is on disk, and
counts only once its rows are committed; whatever a kill leaves behind is never read and is discarded at the next start.
"""

import hashlib
import logging
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from sqlalchemy import func, select

from adaptive_spec.core import Trace
from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import TraceRow

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_UNFINISHED = ".unfinished"
_LOOP_TOKENS = 64  # the end of a completion that is looked at for a loop
_LOOP_SHARE = 0.25  # of distinct tokens in it, at or under which it is one
_LOOP_MIN_TOKENS = 16


def is_held_out(tokens: Sequence[int], prompt_tokens: int, share: float) -> bool:
    """Say whether a prompt belongs to the held-out set.

    The prompt alone decides, by SHA-256 of its ids: the same prompt falls on the same side today, tomorrow and on
    every machine, and no completion of a training prompt is ever held out.
    """
    digest = hashlib.sha256(_id_bytes(tokens[:prompt_tokens])).digest()
    return int.from_bytes(digest[:8], "little") < share * 2**64


def is_degenerate(completion: Sequence[int]) -> bool:
    """Say whether a completion ends in a loop.  Loops are easy to draft and teach a draft nothing but looping."""
    end = completion[-_LOOP_TOKENS:]
    return len(end) >= _LOOP_MIN_TOKENS and len(set(end)) <= _LOOP_SHARE * len(end)


class TraceStore:
    """The traces of one service.

    Args:
        database: holds a row per trace.
        folder: holds the shards; made when missing.
        held_out_share: of the prompts, kept from training for the gate.
    """

    def __init__(self, database: Database, folder: Path, held_out_share: float) -> None:
        self.database = database
        self.folder = Path(folder)
        self.held_out_share = held_out_share
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, traces: list[Trace]) -> int:
        """Store traces as one shard and return how many; degenerate and known ones are passed over.

        Raises:
            OSError: the disk refused.  Nothing is stored then.
            SQLAlchemyError: the database refused.  Nothing is stored then.
        """
        fresh = self._fresh(traces)
        if not fresh:
            return 0
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}{_SUFFIX}"
        self._write_shard(name, list(fresh.values()))
        rows = [self._row(name, place, digest, trace) for place, (digest, trace) in enumerate(fresh.items())]
        try:
            with self.database.session_scope() as session:
                self.database.insert_new(session, TraceRow, rows)
        except BaseException:
            (self.folder / name).unlink(missing_ok=True)
            raise
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
        return self._read(rows)

    def count(self) -> dict[str, tuple[int, int]]:
        """Return per domain how many traces there are to train on, and how many are held out."""
        query = select(TraceRow.domain, TraceRow.held_out, func.count()).group_by(TraceRow.domain, TraceRow.held_out)
        counts: dict[str, tuple[int, int]] = {}
        with self.database.session_scope(read_only=True) as session:
            for domain, held_out, number in session.execute(query.order_by(TraceRow.domain)):
                train, tested = counts.get(domain, (0, 0))
                counts[domain] = (train, number) if held_out else (number, tested)
        return counts

    def discard_orphans(self, min_age_seconds: float = 600.0) -> int:
        """Delete half-written shards and shards without rows, and return how many.

        Args:
            min_age_seconds: younger files stay: another process may be about to commit their rows.
        """
        with self.database.session_scope(read_only=True) as session:
            known = set(session.scalars(select(TraceRow.shard).distinct()))
        newest = time.time() - min_age_seconds
        orphans = [
            path
            for path in self.folder.iterdir()
            if path.name not in known and path.suffix in (_SUFFIX, _UNFINISHED) and path.stat().st_mtime <= newest
        ]
        for path in orphans:
            path.unlink(missing_ok=True)
        if orphans:
            logger.info("discarded %d unfinished trace shards", len(orphans))
        return len(orphans)

    def _fresh(self, traces: list[Trace]) -> dict[str, Trace]:
        """Return digest -> trace of those worth storing."""
        fresh = {_digest(trace): trace for trace in traces if not is_degenerate(trace.tokens[trace.prompt_tokens :])}
        with self.database.session_scope(read_only=True) as session:
            known = set(session.scalars(select(TraceRow.digest).where(TraceRow.digest.in_(list(fresh)))))
        return {digest: trace for digest, trace in fresh.items() if digest not in known}

    def _row(self, shard: str, place: int, digest: str, trace: Trace) -> dict[str, Any]:
        return {
            "digest": digest,
            "shard": shard,
            "place": place,
            "request_id": trace.request_id,
            "domain": trace.domain,
            "prompt_tokens": int(trace.prompt_tokens),
            "completion_tokens": len(trace.tokens) - int(trace.prompt_tokens),
            "release": int(trace.release),
            "held_out": is_held_out(trace.tokens, trace.prompt_tokens, self.held_out_share),
            "at": trace.at,
        }

    def _write_shard(self, name: str, traces: list[Trace]) -> None:
        tensors: dict[str, Any] = {}
        for place, trace in enumerate(traces):
            tensors[f"{place}.tokens"] = numpy.asarray(trace.tokens, dtype=numpy.int32)
            tensors[f"{place}.top_ids"] = numpy.ascontiguousarray(trace.top_ids, dtype=numpy.int32)
            tensors[f"{place}.top_log_probs"] = numpy.ascontiguousarray(trace.top_log_probs, dtype=numpy.float32)
            tensors[f"{place}.tail_mass"] = numpy.ascontiguousarray(trace.tail_mass, dtype=numpy.float32)
        unfinished = self.folder / (name + _UNFINISHED)
        try:
            with unfinished.open("wb") as file:
                file.write(save(tensors))
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(self.folder / name)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        _sync_folder(self.folder)

    def _read(self, rows: list[TraceRow]) -> list[Trace]:
        by_shard: dict[str, list[TraceRow]] = defaultdict(list)
        for row in rows:
            by_shard[row.shard].append(row)
        found: dict[int, Trace] = {}
        for shard, members in by_shard.items():
            try:
                found.update(_read_shard(self.folder / shard, members))
            except (SafetensorError, OSError) as error:
                logger.warning("%d traces are passed over: %s: %s", len(members), self.folder / shard, error)
        return [found[row.id] for row in rows if row.id in found]


def _read_shard(path: Path, rows: list[TraceRow]) -> dict[int, Trace]:
    with safe_open(path, framework="numpy") as shard:
        return {
            row.id: Trace(
                request_id=row.request_id,
                domain=row.domain,
                tokens=tuple(shard.get_tensor(f"{row.place}.tokens").tolist()),
                prompt_tokens=row.prompt_tokens,
                top_ids=shard.get_tensor(f"{row.place}.top_ids"),
                top_log_probs=shard.get_tensor(f"{row.place}.top_log_probs"),
                tail_mass=shard.get_tensor(f"{row.place}.tail_mass"),
                release=row.release,
                at=row.at,
            )
            for row in rows
        }


def _digest(trace: Trace) -> str:
    return hashlib.sha256(f"{trace.prompt_tokens}:".encode() + _id_bytes(trace.tokens)).hexdigest()


def _id_bytes(tokens: Sequence[int]) -> bytes:
    return numpy.asarray(tokens, dtype="<i8").tobytes()


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere folders cannot be opened, and renames are durable by themselves
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
