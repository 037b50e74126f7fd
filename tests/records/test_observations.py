from dataclasses import replace

import numpy
import pytest

from adaptive_spec.core import MatchAcceptance
from adaptive_spec.records.database import Database
from adaptive_spec.records.observations import ngram_acceptance, observations, pool
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


def test_ngram_tokens_are_counted_by_match_length(database: Database) -> None:
    ngram = make_step("a", 0, drafter="ngram")  # one accepted, one refused
    record(
        database,
        replace(ngram, match_length=3),
        replace(ngram, match_length=3, request_id="b", release=4),
        replace(ngram, match_length=5, request_id="c"),
        replace(ngram, match_length=3, request_id="d", domain="law"),
        replace(ngram, request_id="e"),  # of before match lengths were kept
        make_step("f", 0),
    )
    assert ngram_acceptance(database) == {
        "code": (MatchAcceptance(3, 2, 4), MatchAcceptance(5, 1, 2)),
        "law": (MatchAcceptance(3, 1, 2),),
    }
    assert sum(seen.num_reached for seen in ngram_acceptance(database, limit=2)["code"]) == 2


def test_splits_keep_requests_whole_and_in_order(database: Database) -> None:
    record(database, *(make_step(name, index) for index in range(2) for name in "abcd"))
    code = observations(database)["code"]
    early, late = code.split(0.5)
    assert (early.num_requests, late.num_requests, early.num_steps, late.num_steps) == (2, 2, 4, 4)
    assert early.request_index.max() < late.request_index.min()
    assert pool([late, early]).num_requests == 4
