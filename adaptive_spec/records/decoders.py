"""The processes of the service: each keeps its row fresh, everybody may look.

All times and ages are taken on the database's clock, so a process whose own clock is wrong looks no older.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from sqlalchemy import delete, select, update

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import DecoderRow


@dataclass(frozen=True, slots=True)
class Sign:
    """What a process says of itself.  id: its own, new with each life.  release: the one that it runs."""

    id: str
    host: str
    pid: int
    role: str
    url: str
    version: str
    release: int
    hashes: Mapping[str, str]
    leads: bool


@dataclass(frozen=True, slots=True)
class DecoderRecord:
    """A process and its last sign of life.  gone: there was none for too long."""

    id: str
    host: str
    pid: int
    role: str  # all | decoder | trainer
    url: str
    version: str
    release: int
    hashes: Mapping[str, str]
    state: str  # leads | follows | gone
    started_at: datetime
    heartbeat_at: datetime
    age_seconds: float


def give_sign(database: Database, sign: Sign) -> None:
    """Keep a process's row fresh; one that is not there, because it is new or was given up, is written."""
    said = asdict(sign)
    with database.session_scope() as session:
        now = database.clock(session)
        fresh = update(DecoderRow).where(DecoderRow.id == sign.id).values(**said, heartbeat_at=now)
        if session.scalar(fresh.returning(DecoderRow.id)) is None:
            session.add(DecoderRow(**said, started_at=now, heartbeat_at=now))
        if sign.leads:  # then nobody else does, whatever one that died has said last
            others = update(DecoderRow).where(DecoderRow.leads, DecoderRow.id != sign.id)
            session.execute(others.values(leads=False))


def withdraw(database: Database, decoder_id: str) -> None:
    """Take a process that ends off the list."""
    with database.session_scope() as session:
        session.execute(delete(DecoderRow).where(DecoderRow.id == decoder_id))


def forget_gone(database: Database, after: timedelta) -> None:
    """Take those off the list that have given no sign for so long."""
    with database.session_scope() as session:
        longest_ago = database.clock(session) - after
        session.execute(delete(DecoderRow).where(DecoderRow.heartbeat_at < longest_ago))


def list_decoders(database: Database, gone_seconds: float) -> list[DecoderRecord]:
    """Return every process on the list, in the order of their starts.

    Args:
        gone_seconds: without a sign, after which a process counts as gone.
    """
    with database.session_scope(read_only=True) as session:
        now = database.clock(session)
        rows = session.scalars(select(DecoderRow).order_by(DecoderRow.started_at, DecoderRow.id))
        return [_record(row, (now - row.heartbeat_at).total_seconds(), gone_seconds) for row in rows]


def _record(row: DecoderRow, age_seconds: float, gone_seconds: float) -> DecoderRecord:
    return DecoderRecord(
        id=row.id,
        host=row.host,
        pid=row.pid,
        role=row.role,
        url=row.url,
        version=row.version,
        release=row.release,
        hashes=row.hashes,
        state="gone" if age_seconds > gone_seconds else "leads" if row.leads else "follows",
        started_at=row.started_at,
        heartbeat_at=row.heartbeat_at,
        age_seconds=max(0.0, age_seconds),
    )
