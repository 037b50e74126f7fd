import numpy
import pytest

from adaptive_spec.records.database import Database
from adaptive_spec.records.evidence import recorded_chains
from adaptive_spec.records.releases import add_release, same_draft, set_live
from tests.records.rows import make_evidence, make_step, record


def test_chains_come_back_padded_by_request_in_order_of_time(database: Database) -> None:
    record(
        database,
        make_evidence("late", 0, chain=(5, 6, 7), strict=(False, True, True), similarities=(0.5, 0.25, 1.0)),
        make_evidence("a", 0, greedy=False, temperature=1.5, most_emitted=2),
        make_evidence("late", 1, chain=(), strict=(), similarities=()),
        make_evidence("b", 0, domain="law", release=1, measure="js"),
    )
    found = recorded_chains(database)
    assert list(found) == ["code", "law"]
    code = found["code"]
    assert code.chain.tolist() == [[5, 6, 7], [1, 2, 0], [0, 0, 0]]
    assert code.target_tokens.tolist() == [[9, 6, 7], [1, 9, 0], [0, 0, 0]]
    assert code.strict.tolist() == [[False, True, True], [True, False, False], [False] * 3]
    assert code.similarities.tolist() == [[0.5, 0.25, 1.0], [0.75, 0.25, 0.0], [0.0] * 3]
    assert (code.greedy.tolist(), code.temperature.tolist()) == ([True, False, True], [1.0, 1.5, 1.0])
    assert (code.lengths.tolist(), code.most_emitted.tolist()) == ([3, 2, 0], [4, 2, 1])
    assert (code.request_index.tolist(), code.measure.tolist()) == ([0, 1, 0], ["tv"] * 3)
    assert (code.chain.dtype, code.strict.dtype, code.similarities.dtype) == (numpy.int64, bool, numpy.float32)
    assert found["law"].measure.tolist() == ["js"] and found["law"].request_index.tolist() == [0]


def test_filters(database: Database) -> None:
    record(database, *(make_step("a", index) for index in range(3)))
    record(database, *(make_evidence("a", index) for index in range(3)), make_evidence("c", domain="law", release=2))
    assert {name: len(its) for name, its in recorded_chains(database, releases=(0, 5)).items()} == {"code": 3}
    assert list(recorded_chains(database, releases={2})) == ["law"]
    assert list(recorded_chains(database, domain="code")) == ["code"]
    assert {name: len(its) for name, its in recorded_chains(database, limit=2).items()} == {"code": 1, "law": 1}
    assert len(recorded_chains(database, domain="code", after_step=2)["code"]) == 1
    assert recorded_chains(database, releases=[9]) == {} == recorded_chains(database, after_step=99)


def test_selecting_numbers_requests_anew(database: Database) -> None:
    record(database, *(make_evidence(name, 0) for name in "abc"), make_evidence("a", 1))
    some = recorded_chains(database)["code"].select(numpy.array([False, False, True, True]))
    assert some.request_index.tolist() == [1, 0] and len(some) == 2


def test_a_chain_of_only_empty_chains(database: Database) -> None:
    record(database, make_evidence(chain=(), strict=(), similarities=()))
    found = recorded_chains(database)["code"]
    assert found.chain.shape == (1, 1) and found.lengths.tolist() == [0]


@pytest.mark.parametrize(
    ("version", "same"), [(0, {0, 1, 2}), (2, {0, 1, 2}), (3, {3, 4}), (4, {3, 4}), (5, {5}), (9, {9})]
)
def test_calibrations_draft_as_what_they_calibrate(database: Database, version: int, same: set[int]) -> None:
    """0 <- 1 <- 2 are calibrations; 3 was trained, 4 calibrates it; 5 was trained after a rollback to 0."""
    for number, parent, report in (
        (1, 0, {"kind": "calibration"}),
        (2, 1, {"kind": "calibration"}),
        (3, 2, {"passed": True}),
        (4, 3, {"kind": "calibration"}),
        (5, 0, {"passed": True}),
    ):
        add_release(database, number, None, parent, report)
        set_live(database, number, "test")
    assert same_draft(database, version) == same
