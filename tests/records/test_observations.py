import numpy
import pytest

from adaptive_spec.records.database import Database
from adaptive_spec.records.observations import observations
from tests.records.rows import make_step, record


def test_reached_positions_come_back_in_order(database: Database) -> None:
    record(
        database,
        make_step("a", 0, positions=((0.9, 0.8, True), (0.5, 0.4, False)), explored=True),
        make_step("b", 0, positions=((0.3, 0.2, False),)),
        make_step("a", 1, chain_length=0, positions=()),
        make_step("c", 0, domain="law", release=1),
    )
    found = observations(database)
    assert list(found) == ["code", "law"]
    code = found["code"]
    assert code.position.tolist() == [0, 1, 0]
    assert code.confidence == pytest.approx(numpy.array([0.9, 0.5, 0.3]))
    assert code.overlap == pytest.approx(numpy.array([0.8, 0.4, 0.2]))
    assert code.accepted.tolist() == [True, False, False]
    assert code.explored.tolist() == [True, True, False]
    assert code.request_index.tolist() == [0, 0, 1]
    assert found["law"].request_index.tolist() == [2, 2]
    assert (code.accepted.dtype, code.explored.dtype, code.confidence.dtype) == (bool, bool, numpy.float64)


def test_filters(database: Database) -> None:
    record(database, make_step("a", 0), make_step("c", 0, domain="law", release=1))
    assert list(observations(database, release=1)) == ["law"]
    assert list(observations(database, domain="code")) == ["code"]
    assert list(observations(database, limit=1)) == ["law"]
    assert observations(database, release=9) == {}
