"""What is told of the trace store is what is in it."""

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from adaptive_spec.records.database import Database
from adaptive_spec.records.quota import Quota
from adaptive_spec.records.tables import TraceRow
from adaptive_spec.records.trace_statistics import trace_statistics
from adaptive_spec.records.traces import TraceStore
from tests.records.rows import START, make_trace
from tests.records.test_quota import HELD_OUT, TRAIN


def test_numbers_of_a_domain(database: Database, tmp_path: Path) -> None:
    store = TraceStore(database, tmp_path / "traces", 0.2, Quota(5, 1.0, 0.2))
    made = [make_trace(seed, prompt=HELD_OUT if seed == 3 else TRAIN) for seed in range(3, 6)]
    made.append(make_trace(9, prompt=TRAIN, completion=tuple(range(20)), at=START + timedelta(hours=5)))
    store.add(made)
    store.add([make_trace(10, domain="law", completion=(4,) * 30)])
    code, law = trace_statistics(database)
    assert (code.domain, code.num_traces, code.num_held_out, code.held_out_share) == ("code", 4, 1, 0.25)
    assert (code.num_tokens, code.num_completion_tokens) == (4 * 3 + 3 * 7 + 20, 3 * 7 + 20)
    size = sum(path.stat().st_size for path in store.folder.iterdir())
    assert size <= code.num_bytes < size + 4
    assert code.bytes_per_token == code.num_bytes / 41
    tail = sum(float(trace.tail_mass.sum()) for trace in made)
    assert code.kept_mass == pytest.approx(1 - tail / 41, abs=1e-6)
    assert (code.oldest, code.newest, code.dropped) == (START, START + timedelta(hours=5), {})
    assert (law.domain, law.num_traces, law.kept_mass, law.oldest) == ("law", 0, None, None)
    assert law.dropped == {"loop": 1}
    assert [row.domain for row in trace_statistics(database, domain="law")] == ["law"]
    assert trace_statistics(database, domain="none") == []


def test_traces_that_were_never_weighed_have_no_part_in_the_means(database: Database, tmp_path: Path) -> None:
    store = TraceStore(database, tmp_path / "traces", 0.2)
    store.add([make_trace(0)])
    (before,) = trace_statistics(database)
    store.add([make_trace(1)])
    with database.session_scope() as session:
        old = session.scalars(select(TraceRow).order_by(TraceRow.id.desc()).limit(1)).one()
        old.num_bytes = old.tail_mass = None
    (after,) = trace_statistics(database)
    assert after.num_traces == 2
    assert (after.bytes_per_token, after.kept_mass) == (before.bytes_per_token, before.kept_mass)
