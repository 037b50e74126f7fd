"""Statistics over time: buckets of a minute, an hour or a day, out of the rollups and what is not rolled up yet.

The counts are those of ``statistics``: over a stretch of whole buckets they add up to its figures.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Executable, and_, case, func, select
from sqlalchemy.orm import Session, aliased

from adaptive_spec.errors import RequestError
from adaptive_spec.records.database import Database
from adaptive_spec.records.rollups import STEP_SUMS
from adaptive_spec.records.slices import Slice
from adaptive_spec.records.spans import LENGTHS, SPANS, Span, begun, floor, kept_since, parsed
from adaptive_spec.records.tables import (
    RequestCountRow,
    RequestRollupRow,
    RequestRow,
    RollupStateRow,
    StepRollupRow,
    StepRow,
)

MOST_BUCKETS = 2_000
_ENOUGH_BUCKETS = 500  # for the eye: a span that gives more is not chosen unasked
_STRETCH = timedelta(days=1)  # without a beginning
_COUNTS = (
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_emitted_tokens",
    "num_divergent_tokens",
)
_SPEEDS = ("timed_tokens", "decode_seconds")


@dataclass(frozen=True, slots=True)
class Bucket:
    """What was recorded from ``start`` on for the length of a bucket.  A rate without observations is None.

    num_requests: with their last step in it.  tokens_per_second: of requests that finished in it, whoever drafted.
    The other names are those of ``DomainStatistics``.
    """

    start: datetime
    num_requests: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_emitted_tokens: int
    num_divergent_tokens: int
    draft_acceptance_rate: float | None
    mean_acceptance_length: float | None
    divergence_share: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class Series:
    """Buckets in order of time, those without records left out.  since: the first moment that they cover."""

    bucket: Span
    since: datetime
    until: datetime
    buckets: tuple[Bucket, ...]


def time_series(
    database: Database,
    about: Slice,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    bucket: Span | None = None,
) -> Series:
    """Return the buckets of [since, until).

    Args:
        since: where rollups so fine are deleted already, the series begins later; None: a day before ``until``.
        until: None: now.
        bucket: None: the finest that is there and gives a readable number.

    Raises:
        RequestError: the stretch is empty or has too many such buckets.
    """
    until = until or datetime.now(UTC)
    since = since or until - _STRETCH
    if since >= until:
        raise RequestError("since must lie before until.")
    with database.session_scope(read_only=True) as session:
        kept = kept_since(session)
        span = bucket or _readable(since, until, kept)
        if _number(since, until, span) > MOST_BUCKETS:
            raise RequestError(f"More than {MOST_BUCKETS} buckets. Ask for a larger bucket or a shorter stretch.")
        first = max(floor(since, span), kept[span])
        found = _Buckets(session, about, span, first, until, is_sqlite=database.is_sqlite)
        return Series(span, first, until, found.made())


class _Buckets:
    """The sums of one series."""

    def __init__(
        self, session: Session, about: Slice, span: Span, since: datetime, until: datetime, *, is_sqlite: bool
    ) -> None:
        self._session, self._about, self._span = session, about, span
        self._since, self._until, self._is_sqlite = since, until, is_sqlite
        state = session.get(RollupStateRow, 1)
        self._last_step = state.last_step if state else 0

    def made(self) -> tuple[Bucket, ...]:
        sums: dict[datetime, Counter[str]] = defaultdict(Counter)
        for query, names in ((self._steps(), _COUNTS), (self._speeds(), _SPEEDS)):
            for start, values in self._rows(query, names):
                sums[start].update(values)
        for start, number in self._requests():
            sums[start]["num_requests"] += number
        return tuple(_bucket(start, sums[start]) for start in sorted(sums))

    def _rows(self, queries: Iterable[Executable], names: tuple[str, ...]) -> Iterator[tuple[datetime, dict[str, Any]]]:
        for query in queries:
            for row in self._session.execute(query):
                start = parsed(row.start, self._span) if isinstance(row.start, str) else row.start
                yield start, {name: getattr(row, name) or 0 for name in names}

    def _begun(self, at: Any) -> Any:
        return begun(at, self._span, is_sqlite=self._is_sqlite).label("start")

    def _within(self, at: Any) -> list[Any]:
        return [at >= self._since, at < self._until]

    def _rolled_up(self, table: Any) -> list[Any]:
        return [table.span == self._span, *self._within(table.start)]

    def _steps(self) -> Iterator[Executable]:
        start = self._begun(StepRow.at)
        raw = [STEP_SUMS[name].label(name) for name in _COUNTS]
        fresh = [StepRow.id > self._last_step, *self._within(StepRow.at)]
        yield select(start, *raw).where(*fresh, *self._about.of_steps(StepRow)).group_by(start)
        table = StepRollupRow
        added = [func.sum(getattr(table, name)).label(name) for name in _COUNTS]
        conditions = [*self._rolled_up(table), *self._about.of_steps(table)]
        yield select(table.start, *added).where(*conditions).group_by(table.start)

    def _speeds(self) -> Iterator[Executable]:
        raw, timed = RequestRow, RequestRow.decode_seconds > 0
        start = self._begun(raw.finished_at)
        columns = (
            func.sum(case((timed, raw.completion_tokens), else_=0)).label("timed_tokens"),
            func.sum(case((timed, raw.decode_seconds), else_=0.0)).label("decode_seconds"),
        )
        fresh = [~raw.rolled_up, *self._within(raw.finished_at), *self._about.of_requests()]
        yield select(start, *columns).where(*fresh).group_by(start)
        table = RequestRollupRow
        added = [func.sum(getattr(table, name)).label(name) for name in _SPEEDS]
        conditions = [*self._rolled_up(table), *self._about.of(table, "domain", "release", "policy")]
        yield select(table.start, *added).where(*conditions).group_by(table.start)

    def _requests(self) -> Iterator[tuple[datetime, int]]:
        """Requests by the bucket of their last such step that is rolled up; of the last at all, if none is."""
        other = aliased(StepRow)
        same = and_(other.request_id == StepRow.request_id, other.domain == StepRow.domain)
        earlier = [same, other.id <= self._last_step, other.at >= self._since, *self._about.of_steps(other)]
        fresh = [StepRow.id > self._last_step, StepRow.at >= self._since, *self._about.of_steps(StepRow)]
        last = (
            select(StepRow.request_id, func.max(StepRow.at).label("at"))
            .where(*fresh, ~select(other.id).where(*earlier).exists())
            .group_by(StepRow.request_id, StepRow.domain)
        )
        for row in self._session.execute(last):
            if row.at < self._until:
                yield floor(row.at, self._span), 1
        table = RequestCountRow
        number = func.sum(table.num_requests).label("num_requests")
        conditions = [*self._rolled_up(table), *self._about.of_counts()]
        for counted in self._session.execute(select(table.start, number).where(*conditions).group_by(table.start)):
            yield counted.start, int(counted.num_requests)


def _bucket(start: datetime, sums: Counter[str]) -> Bucket:
    counts = {name: int(sums[name]) for name in ("num_requests", *_COUNTS)}
    drafted, steps, emitted = (counts[f"num_{name}"] for name in ("draft_tokens", "spec_steps", "emitted_tokens"))
    accepted, seconds = counts["num_accepted_draft_tokens"], float(sums["decode_seconds"])
    return Bucket(
        start,
        **counts,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1 + accepted / steps if steps else None,
        divergence_share=counts["num_divergent_tokens"] / emitted if emitted else None,
        tokens_per_second=float(sums["timed_tokens"]) / seconds if seconds else None,
    )


def _readable(since: datetime, until: datetime, kept: dict[Span, datetime]) -> Span:
    return next(
        (span for span in SPANS if kept[span] <= since and _number(since, until, span) <= _ENOUGH_BUCKETS), "day"
    )


def _number(since: datetime, until: datetime, span: Span) -> int:
    return int((until - floor(since, span)) / LENGTHS[span]) + 1
