from adaptive_spec.records.database import Database
from adaptive_spec.records.drifts import drift_counts, finished_requests, outcomes_after, step_before_newest
from adaptive_spec.records.events import add_event
from tests.records.rows import make_finish, make_step, record


def test_outcomes_come_in_order_and_of_one_release(database: Database) -> None:
    record(database, *(make_step("a", index) for index in range(5)), make_step("b", 0, release=1))
    record(database, make_step("a", 5, chain_length=0, positions=()))
    first = outcomes_after(database, 0, 0, 3)
    rest = outcomes_after(database, 0, first[-1].step_id, 10)
    assert [len(first), len(rest)] == [3, 2]
    ids = [outcome.step_id for outcome in first + rest]
    assert ids == sorted(ids)
    assert (first[0].num_reached, first[0].num_accepted, first[0].drafter, first[0].verifier) == (
        2,
        1,
        "model",
        "exact",
    )
    assert first[0].confidences.tolist() == [0.8999999761581421, 0.5]
    assert len(outcomes_after(database, 1, 0, 10)) == 1
    assert step_before_newest(database, 0, 2) == ids[2]
    assert step_before_newest(database, 0, 5) == 0
    assert [o.step_id for o in outcomes_after(database, 0, step_before_newest(database, 0, 2), 10)] == ids[3:]


def test_finished_requests(database: Database) -> None:
    record(database, make_finish("a"), make_finish("b"))
    assert finished_requests(database, ["a", "c"]) == {"a"}
    assert finished_requests(database, []) == set()


def test_drift_counts(database: Database) -> None:
    assert drift_counts(database) == {}
    for domain, stream, direction in [("a", "acceptance", "down")] * 2 + [("b", "calibration", "up")]:
        add_event(database, "drift", {"stream": stream, "direction": direction}, domain, 0)
    add_event(database, "drift_answer", {"stream": "acceptance", "direction": "down"}, "a", 0)
    assert drift_counts(database) == {("a", "acceptance", "down"): 2, ("b", "calibration", "up"): 1}
