"""Charts as inline SVG: every one has a title that a screen reader says, and figures that a pointer shows.

Coordinates are those of the view box; colours are the page's CSS variables, so that both colour schemes hold.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from markupsafe import Markup, escape

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 18, 26
_SPARK_WIDTH, _SPARK_HEIGHT = 120, 28
_NUM_TICKS = 4

Points = Sequence[tuple[datetime, float | None]]


@dataclass(frozen=True, slots=True)
class Marker:
    """A vertical line at a moment, and what is written above it."""

    at: datetime
    label: str
    kind: str = "release"  # or canary: the class that styles it


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values in [low, high] to coordinates in [begin, end]."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def sparkline(points: Points, title: str) -> Markup:
    """A line without axes, for a cell of a table; empty with fewer than two values."""
    values = [value for _, value in points if value is not None]
    if len(values) < 2:
        return Markup("")
    across, up = _over(points, 2, _SPARK_WIDTH - 2), _around(values, _SPARK_HEIGHT - 3, 3)
    said = f"{title}: from {values[0]:.2f} to {values[-1]:.2f}, {min(values):.2f} to {max(values):.2f} in between"
    return _svg(_SPARK_WIDTH, _SPARK_HEIGHT, said, _lines(points, across, up), "spark")


def time_chart(
    points: Points, stretch: tuple[datetime, datetime], title: str, unit: str, markers: Iterable[Marker] = ()
) -> Markup:
    """A line over a stretch of time with markers; None in a point parts the line."""
    values = [value for _, value in points if value is not None]
    if not values:
        return nothing(title)
    begin, end = stretch
    across = _Scale(begin.timestamp(), end.timestamp(), _LEFT, _WIDTH - _RIGHT)
    up = _around(values, _HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(up, unit), *_times(begin, end)]
    shown = sorted((marker for marker in markers if begin <= marker.at <= end), key=lambda marker: marker.at)
    parts += [_marker(across(marker.at.timestamp()), index, marker) for index, marker in enumerate(shown)]
    parts.append(_lines(points, across, up))
    parts += [
        _dot(across(at.timestamp()), up(value), f"{at:%Y-%m-%d %H:%M}: {value:.3g} {unit}")
        for at, value in points
        if value is not None
    ]
    return _svg(_WIDTH, _HEIGHT, f"{title}, {unit}: {values[-1]:.3g} last", Markup("").join(parts))


def bars(values: Sequence[float], labels: Sequence[str], title: str) -> Markup:
    """Shares in [0, 1] as bars."""
    if not values:
        return nothing(title)
    up = _Scale(0, 1, _HEIGHT - _BOTTOM, _TOP)
    slot = (_WIDTH - _LEFT - _RIGHT) / len(values)
    parts = list(_grid(up, ""))
    for index, (value, label) in enumerate(zip(values, labels, strict=True)):
        left, top = _LEFT + slot * (index + 0.15), up(value)
        parts.append(
            Markup(
                '<rect class="bar" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{}</title></rect>'
            ).format(left, top, slot * 0.7, up(0) - top, f"{label}: {value:.1%}")
        )
        parts.append(_text(left + slot * 0.35, _HEIGHT - 8, label, "middle"))
        parts.append(_text(left + slot * 0.35, top - 4, f"{value:.0%}", "middle"))
    said = ", ".join(f"{label} {value:.0%}" for value, label in zip(values, labels, strict=True))
    return _svg(_WIDTH, _HEIGHT, f"{title}: {said}", Markup("").join(parts))


def reliability(series: Sequence[tuple[str, Sequence[tuple[float, float, int]]]], title: str) -> Markup:
    """Acceptance over confidence; the diagonal is what confidences promise.

    Args:
        series: name -> bins of (mean confidence, share accepted, observations).
    """
    if not any(bins for _, bins in series):
        return nothing(title)
    size = _HEIGHT + 80
    across, up = _Scale(0, 1, _LEFT, size - _RIGHT), _Scale(0, 1, size - _BOTTOM, _TOP)
    parts = [*_grid(up, "", right=size - _RIGHT)]
    parts += [_text(across(tick), size - 8, f"{tick:g}", "middle") for tick in (0, 0.25, 0.5, 0.75, 1)]
    parts.append(
        Markup('<path class="ideal" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>').format(across(0), up(0), across(1), up(1))
    )
    for index, (name, bins) in enumerate(series):
        line = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y, _ in bins)
        parts.append(Markup('<path class="line series-{}" d="M{}"/>').format(index, line))
        parts += [
            _dot(across(x), up(y), f"{name}: {y:.1%} accepted at {x:.1%}, {count} tokens", f"series-{index}")
            for x, y, count in bins
        ]
        parts.append(
            Markup('<text class="legend series-{}" x="{}" y="{}">{}</text>').format(
                index, _LEFT + 8, _TOP + 14 + 16 * index, name
            )
        )
    return _svg(size, size, title, Markup("").join(parts), "square")


def nothing(title: str) -> Markup:
    """What stands where a chart would, before anything is on record."""
    return Markup('<p class="facts">{}: nothing on record yet.</p>').format(title)


def _over(points: Points, begin: float, end: float) -> _Scale:
    first, last = points[0][0].timestamp(), points[-1][0].timestamp()
    return _Scale(first, max(last, first + 1), begin, end)


def _around(values: Sequence[float], begin: float, end: float) -> _Scale:
    """From a little below the smallest value to a little above the largest."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.1 or abs(high) * 0.1 or 1.0
    return _Scale(max(low - margin, 0.0) if low >= 0 else low - margin, high + margin, begin, end)


def _lines(points: Points, across: _Scale, up: _Scale) -> Markup:
    pieces: list[str] = []
    for (before, earlier), (at, value) in pairwise([(points[0][0], None), *points]):
        if value is not None:
            pen = "M" if earlier is None or before == at else "L"
            pieces.append(f"{pen}{across(at.timestamp()):.1f} {up(value):.1f}")
    return Markup('<path class="line" d="{}"/>').format("".join(pieces))


def _grid(up: _Scale, unit: str, right: float = _WIDTH - _RIGHT) -> Iterable[Markup]:
    for index in range(_NUM_TICKS + 1):
        value = up.low + (up.high - up.low) * index / _NUM_TICKS
        y = up(value)
        yield Markup('<path class="grid" d="M{} {:.1f}H{:.1f}"/>').format(_LEFT, y, right)
        yield _text(_LEFT - 6, y + 4, f"{value:.3g}", "end")
    if unit:
        yield _text(_LEFT, 12, unit, "start")


def _times(begin: datetime, end: datetime) -> Iterable[Markup]:
    form = "%H:%M" if (end - begin).total_seconds() < 36 * 3600 else "%m-%d"
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        at = begin + (end - begin) * share
        yield _text(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - 8, at.strftime(form), anchor)


def _marker(x: float, index: int, marker: Marker) -> Markup:
    """Its label on one of three lines in turn, so that neighbours stay readable, and never beyond the edge."""
    side, anchor = (-3, "end") if x > 0.7 * _WIDTH else (3, "start")
    said = f"{marker.label}, {marker.at:%Y-%m-%d %H:%M}"
    return Markup(
        '<g class="marker {}"><path d="M{:.1f} {}V{}"/><text x="{:.1f}" y="{}" text-anchor="{}">{}</text>'
        "<title>{}</title></g>"
    ).format(marker.kind, x, _TOP, _HEIGHT - _BOTTOM, x + side, _TOP + 9 + 12 * (index % 3), anchor, marker.label, said)


def _dot(x: float, y: float, said: str, kind: str = "") -> Markup:
    return Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="3"><title>{}</title></circle>').format(
        kind, x, y, said
    )


def _text(x: float, y: float, said: str, anchor: str) -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(x, y, anchor, said)


def _svg(width: int, height: int, title: str, inside: Markup, kind: str = "chart") -> Markup:
    head = f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return Markup(head) + inside + Markup("</svg>")
