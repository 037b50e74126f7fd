"""Runs that one process asks for and another begins; one at a time, whoever tries."""

import os
import threading
from collections.abc import Callable

import pytest

from adaptive_spec.errors import RunError
from adaptive_spec.records.database import Database
from adaptive_spec.records.decoders import Sign, give_sign
from adaptive_spec.records.runs import (
    active_run,
    claim_run,
    create_run,
    fail_orphans,
    get_run,
    list_runs,
    reopen_run,
    request_run,
    requested_run,
    update_run,
)
from adaptive_spec.records.tables import RunRow
from tests.records.test_decoders import silence


def test_a_run_is_asked_for_and_claimed_once(database: Database) -> None:
    assert claim_run(database, {"rank": 4}) is None
    run_id = request_run(database, "person")
    assert requested_run(database) == run_id
    run = get_run(database, run_id)
    assert (run.state, run.pid, run.settings) == ("requested", None, {})
    with pytest.raises(RunError, match=f"Run {run_id} is requested"):
        request_run(database, "person")
    with pytest.raises(RunError, match="is requested"):
        create_run(database, "person", {}, alone=True)
    assert fail_orphans(database) == []  # nobody's yet
    assert claim_run(database, {"rank": 4}) == run_id
    run = get_run(database, run_id)
    assert (run.state, run.pid, run.settings) == ("queued", os.getpid(), {"rank": 4})
    assert requested_run(database) is None and claim_run(database, {}) is None
    active = active_run(database)
    assert active is not None and active.id == run_id


def test_a_run_that_was_cut_short_can_be_asked_for_and_keeps_its_settings(database: Database) -> None:
    run_id = create_run(database, "person", {"rank": 4})
    with pytest.raises(RunError, match="only one that was cut short"):
        reopen_run(database, run_id, ask=True)
    update_run(database, run_id, state="failed", error="killed")
    reopen_run(database, run_id, ask=True)
    assert get_run(database, run_id).state == "requested"
    assert claim_run(database, {"rank": 8}) == run_id
    run = get_run(database, run_id)
    assert (run.state, run.settings, run.report["num_resumptions"]) == ("queued", {"rank": 4}, 1)


@pytest.mark.parametrize(
    "begin", [lambda d: create_run(d, "x", {}, alone=True), lambda d: request_run(d, "x")], ids=["create", "request"]
)
def test_many_that_begin_at_once_make_one_run(database: Database, begin: Callable[[Database], int]) -> None:
    refused: list[RunError] = []
    start = threading.Barrier(6)

    def try_it() -> None:
        other = Database(database.url.render_as_string(hide_password=False))
        start.wait()
        try:
            begin(other)
        except RunError as error:
            refused.append(error)
        finally:
            other.close()

    threads = [threading.Thread(target=try_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list_runs(database)) == 1 and len(refused) == 5


def test_runs_of_a_machine_that_fell_silent_fail_at_once(database: Database) -> None:
    run_id = create_run(database, "person", {})
    with database.session_scope() as session:
        row = session.get(RunRow, run_id)
        assert row is not None
        row.host = "elsewhere"
    assert fail_orphans(database, gone_seconds=10) == []  # not on the list: an hour must pass
    sign = Sign("a", "elsewhere", 7, "trainer", "http://elsewhere:8000", "1", 0, {}, True)
    give_sign(database, sign)
    assert fail_orphans(database, gone_seconds=10) == []
    silence(database, "a", 60)
    assert fail_orphans(database, gone_seconds=10) == [run_id]
