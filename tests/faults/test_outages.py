"""What the service stands on goes away and comes back: the database, the disk, the right time."""

import resource
import sqlite3
import subprocess
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from adaptive_spec.records.releases import live_version
from tests.faults.bundles import make_release
from tests.faults.conftest import Place
from tests.faults.traffic import Traffic
from tests.postgresql import PostgreSQL
from tests.process import call, until

pytestmark = pytest.mark.faults


@contextmanager
def away(place: Place, server: PostgreSQL) -> Iterator[None]:
    """Stop the database: a server is killed, a file is locked by somebody who does not let go."""
    if not place.database.is_sqlite:
        server.stop()
        try:
            yield
        finally:
            server.start()
        return
    connection = sqlite3.connect(place.database.url.database or "", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


def test_the_database_goes_away_and_comes_back(place: Place, postgresql_server: PostgreSQL) -> None:
    with place.serving() as process, Traffic(place.url, place.models.answers) as traffic:
        traffic.more(10)
        with away(place, postgresql_server):
            traffic.more(20)
            if not place.database.is_sqlite:  # readers of a locked file do not wait
                with pytest.raises(urllib.error.HTTPError, match="503"):
                    call(f"{place.url}/api/stats")
            assert call(f"{place.url}/readyz")["status"] == "ok"
        traffic.more()
        until(lambda: call(f"{place.url}/api/stats")["domains"])
        make_release(place.database_url, place.releases, 1, place.models.adapter, place.models.pair.hashes)
        place.follows(1)
        traffic.more()
    traffic.check()
    assert process.returncode == 0
    place.check_records(traffic)


def test_a_run_that_loses_its_database_goes_on_when_it_is_back(
    make_place: Callable[[str], Place], postgresql_server: PostgreSQL
) -> None:
    place = make_place("postgresql")
    place.store_traces()
    training = {"LEARNING__MAX_EPOCHS": 200, "LEARNING__CHECKPOINT_SECONDS": 0.2}
    with place.serving(**training) as process, Traffic(place.url, place.models.answers, 1) as traffic:
        run_id = call(f"{place.url}/api/retrain", {})["run_id"]
        until(lambda: list((place.releases / "runs" / str(run_id)).glob("checkpoint*")), 120)
        with away(place, postgresql_server):
            time.sleep(3)  # longer than between two reports of progress, and the lead is lost
        resumed = until(lambda: place.run(run_id)["report"].get("num_resumptions") and place.run(run_id), 180)
        assert resumed["report"]["num_resumptions"] == 1 and resumed["state"] in ("queued", "running")
        call(f"{place.url}/api/runs/{run_id}/cancel", {})
        until(lambda: place.run(run_id)["state"] == "cancelled")
        assert until(lambda: call(f"{place.url}/api/retrain", {})["run_id"]) > run_id  # a crash leaves gaps in numbers
    traffic.check()
    assert process.returncode == 0
    place.check_records(traffic)


@contextmanager
def full_disk(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """No file of the process may grow, or be written to at all."""
    before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_a_release_and_nothing_else(place: Place) -> None:
    with place.serving() as process, Traffic(place.url, place.models.answers) as traffic:
        traffic.more(60)
        with full_disk(process):
            with pytest.raises(urllib.error.HTTPError):
                call(f"{place.url}/api/calibrate", {})
            traffic.more(10)
            assert live_version(place.database) == 0 == place.live()
            assert list(place.releases.glob("release-*")) == []
        call(f"{place.url}/api/calibrate", {})
        place.follows(1)
        traffic.more()
    traffic.check()
    place.check_records(traffic)


@pytest.mark.parametrize("hours", [2, -2])
def test_a_clock_that_is_off(place: Place, hours: float) -> None:
    """The service's clock is off, the publisher's is right; then a service with the right one takes over."""
    with (
        place.serving(FAULT_CLOCK_SECONDS=hours * 3600) as process,
        Traffic(place.url, place.models.answers) as traffic,
    ):
        make_release(place.database_url, place.releases, 1, place.models.adapter, place.models.pair.hashes)
        place.follows(1)
        traffic.more(60)
        call(f"{place.url}/api/calibrate", {})
        place.follows(2)
        (event, *_) = until(lambda: place.events("release_swapped", 2))
        assert abs(event.at.timestamp() - time.time() - hours * 3600) < 300  # it was off
    traffic.check()
    assert process.returncode == 0
    place.check_records(traffic)
    with place.serving(), Traffic(place.url, place.models.answers) as later:
        assert place.live() == 2
        later.more(60)
        call(f"{place.url}/api/calibrate", {})
        later.more()
    later.check()
    place.check_records(later)
