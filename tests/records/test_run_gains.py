"""What the last runs gained, as triggers read it."""

from datetime import UTC, datetime, timedelta

from adaptive_spec.records.database import Database
from adaptive_spec.records.runs import RunGain, create_run, last_gains, update_run

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_last_that_learned_to_their_end_newest_first(database: Database) -> None:
    for number, state in enumerate(("passed", "refused", "failed", "passed", "running")):
        gain = {"num_new_traces": 100 * number, "gain_share": 0.01, "gain_share_high": 0.02}
        update_run(database, create_run(database, "test", {}), state=state, report={"gain": gain})
    assert last_gains(database, LONG_AGO) == (RunGain(300, 0.01, 0.02), RunGain(100, 0.01, 0.02))
    assert last_gains(database, datetime.now(UTC) + timedelta(minutes=1)) == ()


def test_a_run_that_could_not_measure_it_is_left_out(database: Database) -> None:
    update_run(database, create_run(database, "test", {}), state="refused", report={"gain": None})
    update_run(database, create_run(database, "test", {}), state="passed", report={"training": {}})
    assert last_gains(database, LONG_AGO) == ()
