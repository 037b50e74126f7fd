"""The tables.  Read by the query modules of this room and by the migrations; rows never leave the room.

``steps`` keeps what a step showed in one row.  Reached positions are a prefix of accepted ones and at most one
rejected, so ``num_reached`` and ``num_reached_accepted`` say which positions were accepted, and the per-position
statistics are a GROUP BY over two integers instead of a table with a row per token.
"""

import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import numpy
from sqlalchemy import JSON, BigInteger, Dialect, Double, Index, Integer, LargeBinary, MetaData, String, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import DateTime, TypeDecorator

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}
Json = JSON().with_variant(JSONB(), "postgresql")
RowId = BigInteger().with_variant(Integer(), "sqlite")  # SQLite numbers rows by itself only when the key is INTEGER


_MANY = 32  # numbers in a list that is no longer packed by a ready packer


class UtcDateTime(TypeDecorator[datetime]):
    """An aware UTC time on every database; SQLite forgets the zone, so it is put back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Refuse naive times and store UTC."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("times must be aware: use datetime.now(UTC)")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return an aware UTC time."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Packed(TypeDecorator[Sequence[float]]):
    """A short list of numbers as the bytes of an array of one dtype: an eighth of the JSON."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.dtype = dtype
        self._code = {"<f4": "f", "<i4": "i", "?": "?"}[dtype]
        self._packers = [struct.Struct(f"<{length}{self._code}").pack for length in range(_MANY)]

    def process_bind_param(self, value: Sequence[float] | None, dialect: Dialect) -> bytes | None:
        """Pack."""
        return None if value is None else self.pack(value)

    def pack(self, value: Sequence[float]) -> bytes:
        """Return what is stored."""
        length = len(value)  # nearly always short: numpy takes ten times as long for so few
        return self._packers[length](*value) if length < _MANY else struct.pack(f"<{length}{self._code}", *value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        """Unpack to a numpy array."""
        return None if value is None else numpy.frombuffer(value, dtype=self.dtype)


Floats, Tokens, Flags = Packed("<f4"), Packed("<i4"), Packed("?")


class Base(DeclarativeBase):
    """Carries the metadata that the migrations are compared with."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar = {
        float: Double(),
        datetime: UtcDateTime(),
        dict[str, Any]: Json,
        list[int]: Json,
        list[float]: Json,
    }


class RequestRow(Base):
    """A finished request."""

    __tablename__ = "requests"

    request_id: Mapped[str] = mapped_column(String, primary_key=True)
    domain: Mapped[str]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    num_steps: Mapped[int]
    num_draft_tokens: Mapped[int]
    num_accepted_draft_tokens: Mapped[int]
    finish_reason: Mapped[str]
    releases: Mapped[list[int]]
    first_release: Mapped[int]  # smallest and largest of releases: equal when one release served the whole request
    last_release: Mapped[int]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime] = mapped_column(index=True)
    time_to_first_token_seconds: Mapped[float]
    decode_seconds: Mapped[float]
    policy: Mapped[str]
    rolled_up: Mapped[bool] = mapped_column(default=False)

    __table_args__ = (Index(None, "domain", "finished_at"), Index(None, "rolled_up", "domain", "finished_at"))


class StepRow(Base):
    """What one step showed.  No foreign key to ``requests``: steps are written while the request still runs."""

    __tablename__ = "steps"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    request_id: Mapped[str]
    step_index: Mapped[int]
    domain: Mapped[str]
    release: Mapped[int]
    drafter: Mapped[str]  # model, ngram, or empty when nothing was proposed
    chain_length: Mapped[int]
    num_accepted: Mapped[int]
    num_emitted: Mapped[int]
    num_reached: Mapped[int]
    num_reached_accepted: Mapped[int]
    overlap_sum: Mapped[float]
    confidences: Mapped[Any] = mapped_column(Floats, nullable=False)
    overlaps: Mapped[Any] = mapped_column(Floats, nullable=False)
    explored: Mapped[bool]
    draft_seconds: Mapped[float]
    verify_seconds: Mapped[float]
    batch_size: Mapped[int]
    verifier: Mapped[str]
    num_divergent: Mapped[int]  # emitted tokens that exact verification would have refused
    total_variation: Mapped[float]  # summed over them, as the log-prob given up
    given_up_nats: Mapped[float]
    match_length: Mapped[int]  # of an n-gram chain, else 0
    request_temperature: Mapped[float]  # 0: greedy
    policy: Mapped[str]  # of the request; empty where it is not known
    at: Mapped[datetime] = mapped_column(index=True)

    __table_args__ = (Index(None, "request_id", "step_index", unique=True),)


class StepRollupRow(Base):
    """Steps of one span of time that are alike in all that statistics ask for, counted and added up."""

    __tablename__ = "step_rollups"

    span: Mapped[str] = mapped_column(String, primary_key=True)  # minute, hour or day, in UTC
    start: Mapped[datetime] = mapped_column(primary_key=True)
    domain: Mapped[str] = mapped_column(String, primary_key=True)
    release: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    drafter: Mapped[str] = mapped_column(String, primary_key=True)
    verifier: Mapped[str] = mapped_column(String, primary_key=True)
    policy: Mapped[str] = mapped_column(String, primary_key=True)
    num_reached: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    num_reached_accepted: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    num_steps: Mapped[int] = mapped_column(BigInteger)
    num_spec_steps: Mapped[int] = mapped_column(BigInteger)
    num_draft_tokens: Mapped[int] = mapped_column(BigInteger)
    num_accepted_draft_tokens: Mapped[int] = mapped_column(BigInteger)
    num_emitted_tokens: Mapped[int] = mapped_column(BigInteger)
    num_divergent_tokens: Mapped[int] = mapped_column(BigInteger)
    overlap_sum: Mapped[float]
    total_variation: Mapped[float]
    given_up_nats: Mapped[float]

    __table_args__ = ({"sqlite_with_rowid": False},)  # the key is most of the row: stored once


class RequestCountRow(Base):
    """Requests whose *last* step of a kind lies in the span: of any span on, they add up to distinct requests.

    A request is counted once for every kind of step it has, in each of which any of release, drafter and verifier may
    be left open (``rollups.ANY_RELEASE``, ``rollups.ANY``).
    """

    __tablename__ = "request_counts"

    span: Mapped[str] = mapped_column(String, primary_key=True)
    start: Mapped[datetime] = mapped_column(primary_key=True)
    domain: Mapped[str] = mapped_column(String, primary_key=True)
    release: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    drafter: Mapped[str] = mapped_column(String, primary_key=True)
    verifier: Mapped[str] = mapped_column(String, primary_key=True)
    policy: Mapped[str] = mapped_column(String, primary_key=True)
    num_requests: Mapped[int] = mapped_column(BigInteger)

    __table_args__ = ({"sqlite_with_rowid": False},)


class RequestRollupRow(Base):
    """Requests that finished in one span of time, added up."""

    __tablename__ = "request_rollups"

    span: Mapped[str] = mapped_column(String, primary_key=True)
    start: Mapped[datetime] = mapped_column(primary_key=True)
    domain: Mapped[str] = mapped_column(String, primary_key=True)
    release: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # ANY_RELEASE: several
    policy: Mapped[str] = mapped_column(String, primary_key=True)
    num_requests: Mapped[int] = mapped_column(BigInteger)
    timed_tokens: Mapped[int] = mapped_column(BigInteger)  # completion tokens of those that were decoded
    decode_seconds: Mapped[float]

    __table_args__ = ({"sqlite_with_rowid": False},)


class RollupStateRow(Base):
    """One row: how far the rollups are, and from when on what is finer than a day is still all there.

    A time that is None: since ever.
    """

    __tablename__ = "rollup_state"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    last_step: Mapped[int] = mapped_column(BigInteger)  # id of the last step that is rolled up
    steps_since: Mapped[datetime | None]  # raw rows, of requests too
    minutes_since: Mapped[datetime | None]
    hours_since: Mapped[datetime | None]


class EvidenceRow(Base):
    """A chain measured whole.  Arrays have a value per token of the chain, which may be empty."""

    __tablename__ = "evidence"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    request_id: Mapped[str]
    step_index: Mapped[int]
    domain: Mapped[str]
    release: Mapped[int]
    drafter: Mapped[str]
    chain: Mapped[Any] = mapped_column(Tokens, nullable=False)
    target_tokens: Mapped[Any] = mapped_column(Tokens, nullable=False)
    strict: Mapped[Any] = mapped_column(Flags, nullable=False)
    measure: Mapped[str]
    similarities: Mapped[Any] = mapped_column(Floats, nullable=False)
    greedy: Mapped[bool]
    temperature: Mapped[float]
    most_emitted: Mapped[int]
    at: Mapped[datetime]

    __table_args__ = (
        Index(None, "request_id", "step_index", unique=True),
        Index(None, "domain", "release"),
    )


class TraceRow(Base):
    """Where a trace lies: ``shard`` is a file name in the trace folder, ``place`` the trace's number in it."""

    __tablename__ = "traces"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    digest: Mapped[str] = mapped_column(String, unique=True)  # of prompt and completion
    shard: Mapped[str] = mapped_column(String, index=True)
    place: Mapped[int]
    request_id: Mapped[str] = mapped_column(String, index=True)
    domain: Mapped[str]
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    release: Mapped[int]
    held_out: Mapped[bool]
    at: Mapped[datetime]
    num_bytes: Mapped[int | None]  # of the shard; None, as tail_mass: written before these were kept
    tail_mass: Mapped[float | None]  # summed over the completion

    __table_args__ = (Index(None, "domain", "held_out", "id"),)


class TraceDropRow(Base):
    """How many traces of a domain were not kept, or not any longer, for one reason."""

    __tablename__ = "trace_drops"

    domain: Mapped[str] = mapped_column(String, primary_key=True)
    reason: Mapped[str] = mapped_column(String, primary_key=True)
    num_traces: Mapped[int]


class ReleaseRow(Base):
    """A version.  Release 0 has no row; it is live when no row is."""

    __tablename__ = "releases"

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    folder: Mapped[str | None]
    parent: Mapped[int | None]
    state: Mapped[str]
    report: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]

    __table_args__ = (
        Index(
            "uq_releases_live",
            "state",
            unique=True,
            sqlite_where=text("state = 'live'"),
            postgresql_where=text("state = 'live'"),
        ),
    )


class CanaryRow(Base):
    """A release on trial beside the live one; at most one runs."""

    __tablename__ = "canaries"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    release: Mapped[int]
    live: Mapped[int]
    share: Mapped[float]
    state: Mapped[str]
    reason: Mapped[str]
    report: Mapped[dict[str, Any]]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        Index(
            "uq_canaries_running",
            "state",
            unique=True,
            sqlite_where=text("state = 'running'"),
            postgresql_where=text("state = 'running'"),
        ),
    )


class RunRow(Base):
    """A training run."""

    __tablename__ = "runs"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    trigger: Mapped[str]
    state: Mapped[str] = mapped_column(String, index=True)
    settings: Mapped[dict[str, Any]]
    progress: Mapped[dict[str, Any]]
    report: Mapped[dict[str, Any]]
    error: Mapped[str | None]
    release: Mapped[int | None]
    pid: Mapped[int | None]
    host: Mapped[str]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    cancel_reason: Mapped[str | None]  # why somebody wants it ended; whoever runs it heeds that


class RunLogRow(Base):
    """What a run told at one time."""

    __tablename__ = "run_log"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    run_id: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime]
    kind: Mapped[str]  # state | progress | output
    detail: Mapped[dict[str, Any]]

    __table_args__ = (Index(None, "run_id", "id"),)


class IdempotencyRow(Base):
    """What an order was answered, under the key that its sender gave it; no answer: it is being carried out."""

    __tablename__ = "idempotency_keys"

    key: Mapped[str] = mapped_column(String, primary_key=True)
    digest: Mapped[str]  # of the order
    answer: Mapped[dict[str, Any] | None] = mapped_column(Json)
    begun_at: Mapped[datetime]


class DecoderRow(Base):
    """A process of the service.  Its times are the database's, whatever its own clock says."""

    __tablename__ = "decoders"

    id: Mapped[str] = mapped_column(String, primary_key=True)
    host: Mapped[str]
    pid: Mapped[int]
    role: Mapped[str]  # all | decoder | trainer
    url: Mapped[str]  # where it answers HTTP
    version: Mapped[str]  # of the package
    release: Mapped[int]  # that it runs, not the one it should
    hashes: Mapped[dict[str, Any]]  # of its models and tokenizer
    leads: Mapped[bool]
    started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime]


class JobRow(Base):
    """When a job of the schedule was last begun, by whichever process led; by the database's clock."""

    __tablename__ = "jobs"

    name: Mapped[str] = mapped_column(String, primary_key=True)
    begun_at: Mapped[datetime]


class CalibrationRow(Base):
    """One domain's thresholds as a release carried them."""

    __tablename__ = "calibrations"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    domain: Mapped[str]
    release: Mapped[int]
    thresholds: Mapped[dict[str, Any]]
    report: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]

    __table_args__ = (Index(None, "domain", "id"),)


class ThresholdOverrideRow(Base):
    """Numbers that a person has set for a domain, until they end; by the database's clock."""

    __tablename__ = "threshold_overrides"

    domain: Mapped[str] = mapped_column(String, primary_key=True)
    numbers: Mapped[dict[str, Any]]  # those of a ThresholdOverride that are set
    reason: Mapped[str]
    begun_at: Mapped[datetime]
    until: Mapped[datetime]


class CostRow(Base):
    """What steps cost, under the key that says what for."""

    __tablename__ = "costs"

    key: Mapped[str] = mapped_column(String, primary_key=True)
    model: Mapped[dict[str, Any]]
    measured_at: Mapped[datetime]


class EventRow(Base):
    """Something an operator wants to find again: a swap, a rollback, a refused release."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    kind: Mapped[str]
    domain: Mapped[str | None]
    release: Mapped[int | None]
    detail: Mapped[dict[str, Any]]
    at: Mapped[datetime]

    __table_args__ = (Index(None, "kind", "id"),)


class DriftCountRow(Base):
    """Drifts whose events are deleted: the metrics go on counting them."""

    __tablename__ = "drift_counts"

    domain: Mapped[str] = mapped_column(String, primary_key=True)
    stream: Mapped[str] = mapped_column(String, primary_key=True)
    direction: Mapped[str] = mapped_column(String, primary_key=True)
    num_drifts: Mapped[int]
