"""What the decoder reports, as columns of the tables that keep it.

By column, not by row: there are tens of thousands of steps a second (`docs/operations.md`), and what is made for each
of them costs more in the garbage collector than in itself.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter, itemgetter
from typing import Any

from adaptive_spec.core import ChainEvidence, FinishedRequest, Step
from adaptive_spec.records.tables import Base, EventRow, EvidenceRow, RequestRow, StepRow

Outcome = Step | ChainEvidence | FinishedRequest | dict[str, Any]
Columns = dict[str, Iterable[Any]]  # name -> its values, to be read once
_Takers = dict[str, Callable[[Any], Any]]


def in_bulk(outcomes: Sequence[Outcome]) -> Iterator[tuple[type[Base], Columns]]:
    """Yield table and columns for every type of outcome there is; a dict is an event."""
    found: dict[type, list[Any]] = {}
    for outcome in outcomes:
        found.setdefault(type(outcome), []).append(outcome)
    for type_, members in found.items():
        table, takers = _TABLES[type_]
        yield table, {name: map(take, members) for name, take in takers.items()}


def _releases(request: FinishedRequest) -> Sequence[int]:
    return [int(release) for release in request.releases] or [0]


def _plain(type_: type, but: Collection[str] = ()) -> _Takers:
    """The columns that are called as the fields are."""
    return {field.name: attrgetter(field.name) for field in fields(type_) if field.name not in but}


_TABLES: dict[type, tuple[type[Base], _Takers]] = {
    Step: (
        StepRow,
        _plain(Step, but=("positions",))
        | {
            "num_reached": lambda step: len(step.positions),
            "num_reached_accepted": lambda step: sum([position.accepted for position in step.positions]),
            "overlap_sum": lambda step: sum([position.overlap for position in step.positions]),
            "confidences": lambda step: [position.confidence for position in step.positions],
            "overlaps": lambda step: [position.overlap for position in step.positions],
        },
    ),
    ChainEvidence: (EvidenceRow, _plain(ChainEvidence)),
    FinishedRequest: (
        RequestRow,
        _plain(FinishedRequest, but=("releases", "queue_seconds", "traceparent"))
        | {
            "releases": _releases,
            "first_release": lambda request: min(_releases(request)),
            "last_release": lambda request: max(_releases(request)),
            "rolled_up": lambda _: False,
        },
    ),
    dict: (EventRow, {name: itemgetter(name) for name in ("kind", "detail", "domain", "release", "at")}),
}
