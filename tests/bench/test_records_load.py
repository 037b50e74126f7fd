"""The load test on a small load, and that traffic has the shape it is given."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from adaptive_spec.bench.progress import Teller
from adaptive_spec.bench.records_load import measure, shape_of
from adaptive_spec.bench.records_traffic import DAYS, made_up, traffic
from adaptive_spec.errors import RecordsError
from adaptive_spec.records.database import Database
from adaptive_spec.records.statistics import domain_statistics
from tests.records.rows import make_step, record

END = datetime(2026, 5, 1, tzinfo=UTC)


def test_traffic_has_the_shape_and_the_length_asked_for() -> None:
    shape = made_up(0, END)
    requests = list(traffic(shape, 20_000, END, 1))
    tokens = sum(finished.completion_tokens for _, finished in requests)
    assert 15_000 < tokens < 25_000
    times = [finished.started_at for _, finished in requests]
    assert times == sorted(times) and times[-1] == END and times[0] > END - timedelta(days=DAYS)
    assert len({finished.request_id for _, finished in requests}) == len(requests)
    drafters = Counter(step.drafter for steps, _ in requests for step in steps if step.chain_length)
    assert 0.05 < drafters["ngram"] / drafters.total() < 0.15
    for steps, finished in requests:
        assert [step.step_index for step in steps] == list(range(finished.num_steps))
        assert finished.completion_tokens == sum(step.num_emitted for step in steps)


def test_every_step_that_is_written_is_in_the_figures(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'load.db'}"
    load = measure(url, 3_000, None, 0, Teller())
    database = Database(url)
    found = domain_statistics(database)
    assert sum(row.num_emitted_tokens for row in found) == load.num_tokens
    assert sum(row.num_requests for row in found) == load.num_requests
    database.close()
    told = load.to_dict()
    assert told["steps_per_second"] > 0 and told["raw_bytes"] > 0 and len(told["latencies_seconds"]) == 6
    with pytest.raises(RecordsError, match="empty"):
        measure(url, 10, None, 0, Teller())


def test_a_recorded_shape_is_what_was_recorded(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    database = Database(url)
    database.upgrade()
    with pytest.raises(RecordsError, match="no steps"):
        shape_of(url)
    steps = [make_step("a", 0, chain_length=0, positions=()), make_step("a", 1), make_step("a", 2)]
    record(database, *steps)
    database.close()
    [[first, *rest]] = shape_of(url)
    assert first == steps[0]
    assert [[position.accepted for position in step.positions] for step in rest] == [[True, False], [True, False]]
    assert rest[0].positions[0].confidence == pytest.approx(0.9)
