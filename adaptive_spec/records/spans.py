"""Spans of time that rollups have, and how a window of statistics is pieced together from them.

A window that begins at any moment is: raw rows up to the first minute that is there, minutes up to the first hour,
hours up to the first day, and days from there on; so a month is some thirty days and at most a day of what is finer.
No row is in two pieces.  What is not rolled up yet comes on top.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from sqlalchemy import ColumnElement, String, and_, func, literal_column, or_
from sqlalchemy.orm import InstrumentedAttribute, Session

from adaptive_spec.records.tables import RequestCountRow, RequestRollupRow, RollupStateRow, StepRollupRow

Span = Literal["minute", "hour", "day"]
SPANS: tuple[Span, ...] = ("minute", "hour", "day")
_ZEROED: dict[Span, dict[str, int]] = {
    "minute": {"second": 0, "microsecond": 0},
    "hour": {"minute": 0, "second": 0, "microsecond": 0},
    "day": {"hour": 0, "minute": 0, "second": 0, "microsecond": 0},
}
LENGTHS = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}
_TEXTS: dict[Span, tuple[int, str, str]] = {  # of its beginning: characters of SQLite's text, PostgreSQL's, Python's
    "minute": (16, "YYYY-MM-DD HH24:MI", "%Y-%m-%d %H:%M"),
    "hour": (13, "YYYY-MM-DD HH24", "%Y-%m-%d %H"),
    "day": (10, "YYYY-MM-DD", "%Y-%m-%d"),
}
_EVER = datetime.min.replace(tzinfo=UTC)

Rollup = type[StepRollupRow] | type[RequestCountRow] | type[RequestRollupRow]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rollups of one span that start in [start, end); None is open."""

    span: Span
    start: datetime | None
    end: datetime | None

    def of(self, table: Rollup) -> ColumnElement[bool]:
        """The condition that chooses them."""
        conditions = [table.span == self.span]
        if self.start is not None:
            conditions.append(table.start >= self.start)
        if self.end is not None:
            conditions.append(table.start < self.end)
        return and_(*conditions)


@dataclass(frozen=True, slots=True)
class Window:
    """What statistics from ``start`` on consist of.

    last_step: raw steps above this id are not in any rollup.
    aligned: raw rows of [start, aligned) stand for rollups that begin too early; none where both are equal.
    """

    start: datetime | None
    aligned: datetime | None
    last_step: int
    pieces: tuple[Piece, ...]

    @property
    def has_edge(self) -> bool:
        """Whether raw rows stand for rollups at its beginning."""
        return self.start != self.aligned

    def rolled_up(self, table: Rollup) -> ColumnElement[bool]:
        """The condition that chooses rollups."""
        return or_(*(piece.of(table) for piece in self.pieces))

    def fresh(self, at: InstrumentedAttribute[datetime]) -> list[ColumnElement[bool]]:
        """Conditions on the time of rows that are not rolled up."""
        return [] if self.start is None else [at >= self.start]

    def edge(self, at: InstrumentedAttribute[datetime]) -> list[ColumnElement[bool]]:
        """Conditions on the time of rows that are rolled up and stand for themselves."""
        assert self.start is not None and self.aligned is not None
        return [at >= self.start, at < self.aligned]


def floor(at: datetime, span: Span) -> datetime:
    """Return when the span began in which a time lies."""
    return at.astimezone(UTC).replace(**_ZEROED[span])  # type: ignore[arg-type]


def ceil(at: datetime, span: Span) -> datetime:
    """Return the first beginning of a span at or after a time."""
    begun = floor(at, span)
    return begun if begun == at else begun + LENGTHS[span]


def begun(at: InstrumentedAttribute[datetime], span: Span, *, is_sqlite: bool) -> ColumnElement[str]:
    """When the span began in which a time lies, as text that ``parsed`` reads, alike on both databases."""
    length, there, _ = _TEXTS[span]
    if is_sqlite:
        return func.substr(at, literal_column("1"), literal_column(str(length)), type_=String())
    return func.to_char(func.timezone(literal_column("'UTC'"), at), literal_column(f"'{there}'"), type_=String())


def parsed(text: str, span: Span) -> datetime:
    """Read what ``begun`` gives."""
    return datetime.strptime(text, _TEXTS[span][2]).replace(tzinfo=UTC)


def kept_since(session: Session) -> dict[Span, datetime]:
    """Return from when on rollups of each span are all there."""
    state = session.get(RollupStateRow, 1) or RollupStateRow(id=1, last_step=0)
    return {"minute": state.minutes_since or _EVER, "hour": state.hours_since or _EVER, "day": _EVER}


def window(session: Session, since: datetime | None) -> Window:
    """Return how to read what happened at or after ``since``; None: ever.

    Where rows as fine as ``since`` are deleted already, the window begins with the finest span that is there.
    """
    state = session.get(RollupStateRow, 1) or RollupStateRow(id=1, last_step=0)
    if since is None:
        return Window(None, None, state.last_step, (Piece("day", None, None),))
    kept = kept_since(session)
    start = since.astimezone(UTC)
    if start < (state.steps_since or _EVER):
        start = next(begun for span in SPANS if (begun := floor(start, span)) >= kept[span])
    aligned = next(begun for span in SPANS if (begun := ceil(start, span)) >= kept[span])
    hour, day = ceil(aligned, "hour"), ceil(aligned, "day")
    pieces = (Piece("minute", aligned, hour), Piece("hour", hour, day), Piece("day", day, None))
    return Window(start, aligned, state.last_step, tuple(piece for piece in pieces if piece.start != piece.end))
