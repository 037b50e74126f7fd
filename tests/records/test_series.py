"""Statistics over time are those of the same stretch at once, however much of it is rolled up."""

from datetime import timedelta
from typing import Any

import pytest

from adaptive_spec.errors import RequestError
from adaptive_spec.records.database import Database
from adaptive_spec.records.rollups import roll_up
from adaptive_spec.records.series import MOST_BUCKETS, time_series
from adaptive_spec.records.slices import Slice
from adaptive_spec.records.spans import floor
from adaptive_spec.records.statistics import domain_statistics
from adaptive_spec.records.tables import RollupStateRow
from tests.records.rows import START, record
from tests.records.test_rollups import FILTERS, random_items

DAY = timedelta(days=1)
END = START + 3 * DAY
COUNTS = (
    "num_requests",
    "num_spec_steps",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_emitted_tokens",
    "num_divergent_tokens",
)


def about(**wanted: Any) -> Slice:
    return Slice(**wanted)


@pytest.mark.parametrize("rolled_up", [0, 60])
def test_buckets_add_up_to_the_statistics(database: Database, rolled_up: int) -> None:
    items = random_items(1, 40, START, 0.1)
    record(database, *items[:rolled_up])
    roll_up(database)
    record(database, *items[rolled_up:])
    since = floor(START, "day")
    for wanted in (FILTERS[0], FILTERS[4], FILTERS[6]):
        whole = domain_statistics(database, **wanted, since=since)
        for span in ("minute", "hour"):
            series = time_series(database, about(**wanted), since=since, until=START + DAY, bucket=span)
            for name in COUNTS:
                assert sum(getattr(each, name) for each in series.buckets) == sum(getattr(d, name) for d in whole)
            assert all(floor(each.start, span) == each.start for each in series.buckets)
            starts = [each.start for each in series.buckets]
            assert starts == sorted(set(starts))


def test_rates_by_hand(database: Database) -> None:
    items = random_items(2, 30, START, 0.2)
    record(database, *items)
    roll_up(database)
    series = time_series(database, about(domain="code"), since=floor(START, "day"), until=END, bucket="day")
    (found,) = domain_statistics(database, domain="code")
    assert sum(bucket.num_spec_steps for bucket in series.buckets) == found.num_spec_steps
    for bucket in series.buckets:
        assert bucket.draft_acceptance_rate == bucket.num_accepted_draft_tokens / bucket.num_draft_tokens
        assert bucket.mean_acceptance_length == 1 + bucket.num_accepted_draft_tokens / bucket.num_spec_steps
        assert bucket.divergence_share == bucket.num_divergent_tokens / bucket.num_emitted_tokens
    assert len(series.buckets) == 1 and series.buckets[0].tokens_per_second == pytest.approx(found.tokens_per_second)


def test_the_bucket_suits_the_stretch_and_what_is_kept(database: Database) -> None:
    def chosen(days: float) -> str:
        return time_series(database, about(), since=END - days * DAY, until=END).bucket

    assert [chosen(days) for days in (0.2, 2, 90)] == ["minute", "hour", "day"]
    with database.session_scope() as session:
        session.merge(RollupStateRow(id=1, last_step=0, minutes_since=floor(END, "day")))
    assert chosen(0.9) == "hour"
    begins_late = time_series(database, about(), since=END - DAY, until=END, bucket="minute")
    assert begins_late.since == floor(END, "day")


def test_stretches_without_end_are_refused(database: Database) -> None:
    with pytest.raises(RequestError, match=str(MOST_BUCKETS)):
        time_series(database, about(), since=END - 2 * DAY, until=END, bucket="minute")
    with pytest.raises(RequestError, match="before"):
        time_series(database, about(), since=END, until=END)
