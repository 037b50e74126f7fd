"""What must hold: whenever rollups are made and whatever is deleted then, statistics are those of all raw rows."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, func, select
from sqlalchemy.exc import OperationalError

from adaptive_spec.core import FinishedRequest, Step
from adaptive_spec.records import rollups
from adaptive_spec.records.database import Database
from adaptive_spec.records.domains import list_domains
from adaptive_spec.records.expiry import Expiry, cutoffs
from adaptive_spec.records.rollups import roll_up
from adaptive_spec.records.spans import SPANS, ceil, floor, window
from adaptive_spec.records.statistics import domain_statistics
from adaptive_spec.records.tables import Base, RequestCountRow, RollupStateRow, StepRollupRow, StepRow
from adaptive_spec.settings import RetentionSettings
from tests.records.rows import START, make_finish, make_step, record

Item = Step | FinishedRequest
NOW = START + timedelta(days=10)
DAY = timedelta(days=1)
FILTERS: list[dict[str, Any]] = [
    {},
    {"domain": "code"},
    {"release": 1},
    {"policy": "fixed"},
    {"drafter": "ngram"},
    {"verifier": "logits", "drafter": "model"},
    {"release": 0, "drafter": "model", "verifier": "exact", "policy": "policy", "domain": "law"},
]


def random_items(seed: int, num_requests: int, first: datetime, days: float) -> list[Item]:
    """Steps and ends of requests in the order in which they are recorded: roughly, not exactly, that of their times."""
    generator = numpy.random.default_rng(seed)
    items: list[tuple[float, Item]] = []
    for number in range(num_requests):
        domain, policy = generator.choice(["code", "law"]), generator.choice(["policy", "fixed"])
        at = first + days * DAY * float(generator.random())
        release = int(generator.integers(3))
        for index in range(int(generator.integers(1, 6))):
            reached = int(generator.integers(0, 4))
            accepted = max(0, reached - int(generator.integers(2)))
            positions = tuple((0.5, float(generator.random()), place < accepted) for place in range(reached))
            step = make_step(
                f"{seed}-{number}",
                index,
                domain=str(domain),
                release=release,
                drafter=str(generator.choice(["model", "ngram"])) if reached else "",
                chain_length=reached + int(generator.integers(2)) if reached else 0,
                positions=positions,
                policy=str(policy),
            )
            divergent = int(generator.integers(2))
            verifier = str(generator.choice(["exact", "logits"]))
            step = replace(step, at=at, verifier=verifier, num_divergent=divergent, total_variation=0.3 * divergent)
            late_seconds = float(generator.exponential(600)) * int(generator.integers(2))
            items.append((at.timestamp() + late_seconds, step))
            release += int(generator.integers(2))
            at += timedelta(seconds=float(generator.exponential(50)))
        if generator.random() < 0.8:
            end = make_finish(
                f"{seed}-{number}",
                domain=str(domain),
                policy="cache" if generator.random() < 0.1 else str(policy),
                releases=(release - 1, release) if generator.random() < 0.2 else (release,),
                completion_tokens=int(generator.integers(1, 50)),
                decode_seconds=float(generator.random()) * int(generator.integers(2)),
            )
            items.append((at.timestamp(), replace(end, finished_at=at)))
    return [item for _, item in sorted(items, key=lambda pair: pair[0])]


def everything(
    database: Database, moments: Sequence[datetime | None], filters: Sequence[dict[str, Any]] = FILTERS[:3]
) -> list[dict[str, Any]]:
    """All that statistics tell, under every filter since every moment."""
    return [
        {**asdict(row), "since": since, "filter": str(about)}
        for since in moments
        for about in filters
        for row in domain_statistics(database, since=since, **about)
    ]


def alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Sums of floats depend on their order."""
    assert len(one) == len(other)
    for mine, its in zip(one, other, strict=True):
        for name, value in mine.items():
            wanted = pytest.approx(its[name], abs=1e-9) if isinstance(value, float | tuple) else its[name]
            assert value == wanted, (name, mine["since"], mine["filter"])


def empty(database: Database) -> None:
    with database.session_scope() as session:
        for table in Base.metadata.sorted_tables:
            session.execute(delete(table))


def rows(database: Database, table: Any, *conditions: Any) -> int:
    with database.session_scope(read_only=True) as session:
        return session.scalar(select(func.count()).select_from(table).where(*conditions)) or 0


def prune(database: Database, **days: float) -> dict[str, int]:
    kept = RetentionSettings(**days)  # type: ignore[arg-type]
    return Expiry(database, cutoffs(database, kept, NOW)).delete()


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), days=st.floats(0.01, 3))
def test_figures_are_those_of_raw_rows(
    database: Database, data: st.DataObject, days: float, monkeypatch_batches: Any
) -> None:
    items = random_items(data.draw(st.integers(0, 10**6), "seed"), 20, START, days)
    early = data.draw(st.integers(0, len(items)), "rolled up at first")
    monkeypatch_batches(data.draw(st.integers(10, 60), "steps of a batch"))
    filters = data.draw(st.lists(st.sampled_from(FILTERS), min_size=2, max_size=2), "filters")
    moments = [None, START + data.draw(st.floats(-0.1, 1.1), "since") * days * DAY]
    empty(database)
    record(database, *items)
    expected = everything(database, moments, filters)
    empty(database)
    record(database, *items[:early])
    roll_up(database)
    record(database, *items[early:])
    alike(everything(database, moments, filters), expected)
    roll_up(database)
    alike(everything(database, moments, filters), expected)
    prune(database, minute_days=8, hour_days=9, outcome_days=0)
    alike(everything(database, moments, filters), expected)


@pytest.fixture
def monkeypatch_batches(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda number: monkeypatch.setattr(rollups, "_BATCH_STEPS", number)


def test_without_raw_rows_a_window_begins_with_the_finest_span_that_is_kept(database: Database) -> None:
    items = random_items(3, 60, START, 9.5)
    record(database, *items)
    day, hour, minute, moment = (
        START + timedelta(days=2, hours=3, minutes=4, seconds=5),
        START + timedelta(days=6, hours=3, minutes=4, seconds=5),
        START + timedelta(days=8, hours=3, minutes=4, seconds=5),
        START + timedelta(days=9.4),
    )
    begun = [None, floor(day, "day"), floor(hour, "hour"), floor(minute, "minute"), moment]
    expected = everything(database, begun)
    num_steps = rows(database, StepRow)
    assert roll_up(database) == num_steps
    gone = prune(database, outcome_days=0.7, minute_days=3, hour_days=5)
    assert 0 < gone["steps"] < num_steps and gone["minute rollups"] > 0 and gone["hour rollups"] > 0
    found = everything(database, [None, day, hour, minute, moment])
    alike([{**row, "since": None} for row in found], [{**row, "since": None} for row in expected])
    assert list_domains(database) == ["code", "law"]


def test_rolling_up_again_changes_nothing(database: Database) -> None:
    record(database, *random_items(1, 20, START, 1))
    assert roll_up(database) > 0
    before = everything(database, [None])
    assert roll_up(database) == 0
    alike(everything(database, [None]), before)


def test_a_crash_in_mid_roll_up_loses_and_repeats_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch, monkeypatch_batches: Any
) -> None:
    record(database, *random_items(2, 30, START, 1))
    expected = everything(database, [None])
    monkeypatch_batches(20)
    real, calls = rollups._request_moves, 0

    def crash(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OperationalError("killed", {}, Exception())
        return real(*arguments)

    monkeypatch.setattr(rollups, "_request_moves", crash)
    with pytest.raises(OperationalError):
        roll_up(database)
    with database.session_scope(read_only=True) as session:
        state = session.get_one(RollupStateRow, 1)
        assert session.scalar(select(func.count()).where(StepRow.id <= state.last_step)) == 40
    alike(everything(database, [None]), expected)
    roll_up(database)
    alike(everything(database, [None]), expected)


def test_every_row_is_in_a_minute_an_hour_and_a_day(database: Database) -> None:
    record(database, *random_items(4, 20, START, 2))
    num_steps = roll_up(database)
    for span in SPANS:
        with database.session_scope(read_only=True) as session:
            total = session.scalar(select(func.sum(StepRollupRow.num_steps)).where(StepRollupRow.span == span))
            starts = list(session.scalars(select(StepRollupRow.start).where(StepRollupRow.span == span)))
        assert total == num_steps
        assert all(start == floor(start, span) for start in starts)


def test_a_row_that_comes_late_is_counted_where_it_belongs(database: Database) -> None:
    record(database, make_step("a", 0), make_step("a", 1))
    roll_up(database)
    prune(database, outcome_days=1, minute_days=2, hour_days=3)
    record(database, replace(make_step("b", 0), at=START + timedelta(hours=1)))
    roll_up(database)
    prune(database, outcome_days=1, minute_days=2, hour_days=3)
    [found] = domain_statistics(database)
    assert (found.num_requests, found.num_spec_steps) == (2, 3)
    [of_day] = domain_statistics(database, since=START + timedelta(hours=5))  # only the day is left
    assert of_day == found
    assert rows(database, StepRollupRow, StepRollupRow.span != "day") == 0


def test_a_request_counts_where_its_last_step_is(database: Database) -> None:
    record(database, make_step("a", 0))
    roll_up(database)
    record(database, replace(make_step("a", 1), at=START + timedelta(days=1)))
    roll_up(database)
    assert [row.num_requests for row in domain_statistics(database, since=floor(START + DAY, "day"))] == [1]
    assert [row.num_requests for row in domain_statistics(database)] == [1]
    with database.session_scope(read_only=True) as session:
        counts = select(RequestCountRow.start, func.sum(RequestCountRow.num_requests)).group_by(RequestCountRow.start)
        days = {start: int(number) for start, number in session.execute(counts.where(RequestCountRow.span == "day"))}
    assert days == {floor(START, "day"): 0, floor(START + DAY, "day"): len(list(rollups.kinds(0, "model", "exact")))}


def test_nothing_goes_that_is_not_rolled_up_and_the_newest_step_never(database: Database) -> None:
    record(database, make_step("a", 0), make_step("a", 1))
    assert prune(database, outcome_days=1)["steps"] == 0
    roll_up(database)
    assert prune(database, outcome_days=1)["steps"] == 1
    record(database, make_step("b", 0))
    assert roll_up(database) == 1
    assert [row.num_requests for row in domain_statistics(database)] == [2]


def test_more_steps_than_are_kept_go_earlier(database: Database) -> None:
    record(database, *(make_step("a", index) for index in range(10)))
    roll_up(database)
    assert prune(database, outcome_days=0, outcome_steps=4)["steps"] == 6
    assert rows(database, StepRow) == 4
    assert [row.num_spec_steps for row in domain_statistics(database)] == [10]


def test_counting_first_says_what_deletion_does(database: Database) -> None:
    record(database, *random_items(5, 30, START, 9.5))
    roll_up(database)
    due = cutoffs(database, RetentionSettings(outcome_days=1, minute_days=2, hour_days=4), NOW)
    told = Expiry(database, due).count()
    assert told["steps"] > 0 and told["minute rollups"] > 0
    assert Expiry(database, due).delete() == told
    assert set(Expiry(database, due).delete().values()) == {0}


def test_hours_stay_as_long_as_minutes(database: Database) -> None:
    due = cutoffs(database, RetentionSettings(minute_days=5, hour_days=1), NOW)
    assert due.hours == due.minutes == floor(NOW - 5 * DAY, "day")
    assert cutoffs(database, RetentionSettings(minute_days=0, hour_days=1), NOW).hours is None


def test_pieces_of_a_window_cover_it_once(database: Database) -> None:
    since = datetime(2026, 3, 4, 22, 58, 30, tzinfo=UTC)
    with database.session_scope(read_only=True) as session:
        seen = window(session, since)
    assert (seen.start, seen.aligned) == (since, datetime(2026, 3, 4, 22, 59, tzinfo=UTC))
    assert [(p.span, p.start, p.end) for p in seen.pieces] == [
        ("minute", seen.aligned, datetime(2026, 3, 4, 23, tzinfo=UTC)),
        ("hour", datetime(2026, 3, 4, 23, tzinfo=UTC), datetime(2026, 3, 5, tzinfo=UTC)),
        ("day", datetime(2026, 3, 5, tzinfo=UTC), None),
    ]
    midnight = datetime(2026, 3, 4, tzinfo=UTC)
    assert ceil(midnight, "day") == midnight
    with database.session_scope(read_only=True) as session:
        seen = window(session, midnight)
    assert not seen.has_edge and [piece.span for piece in seen.pieces] == ["day"]
