"""``adaptive-spec bench-records``: how fast outcomes are written, what they take, and how fast statistics answer.

The real writer records a month of traffic into an empty database; making the traffic is not counted.  Statistics are
asked for before and after it is rolled up.  The first hour of the month is filled so that every minute has every kind
of step: the rollups that a window over thirty days reads are then as many as any traffic makes, so what is measured
there holds for ten and a hundred times the tokens too.  Bytes of raw rows grow in proportion.
"""

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep
from typing import Any

from adaptive_spec.bench.progress import Teller
from adaptive_spec.bench.records_traffic import DAYS, Template, again, made_up, traffic
from adaptive_spec.core import FinishedRequest, Step
from adaptive_spec.errors import RecordsError
from adaptive_spec.records.database import Database
from adaptive_spec.records.domains import list_domains
from adaptive_spec.records.replay import recorded_requests
from adaptive_spec.records.rollups import roll_up
from adaptive_spec.records.statistics import domain_statistics
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.records.writer import Writer
from adaptive_spec.settings import RecordSettings

_CHUNK_REQUESTS = 500
_REPEATS = 9
_PAUSE_SECONDS = 0.2  # between two questions, as from people and scrapers

Request = tuple[list[Step], FinishedRequest]


@dataclass(slots=True)
class Load:
    """What one database showed.  Seconds are of the wall, cpu_seconds of this process alone.

    raw_bytes: of the steps and requests; rollup_bytes: what rolling up added.
    latencies_seconds: question -> (best, median) of the repeats; beside other work on the machine they differ.
    """

    database: str
    version: str
    num_requests: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    write_seconds: float = 0.0
    write_cpu_seconds: float = 0.0
    rollup_seconds: float = 0.0
    raw_bytes: int = 0
    rollup_bytes: int = 0
    latencies_seconds: dict[str, tuple[float, float]] | None = None

    @property
    def steps_per_second(self) -> float:
        return self.num_steps / self.write_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, with the figures that follow."""
        return {
            **asdict(self),
            "steps_per_second": self.steps_per_second,
            "steps_per_cpu_second": self.num_steps / max(self.write_cpu_seconds, 1e-9),
            "rolled_up_steps_per_second": self.num_steps / max(self.rollup_seconds, 1e-9),
            "bytes_per_million_steps": 1e6 * self.raw_bytes / self.num_steps,
        }


def measure(url: str, num_tokens: int, shape: Sequence[Template] | None, seed: int, tell: Teller) -> Load:
    """Record, roll up and ask.

    Args:
        url: of a database without records, which is left full.
        shape: requests to draw from; None: the made-up ones.

    Raises:
        RecordsError: the database holds records.
    """
    database = Database(url)
    gc.collect()
    gc.freeze()  # as the service does at its start
    try:
        database.upgrade()
        if list_domains(database):
            raise RecordsError(f"{database} holds records. Name an empty database: this one would be filled.")
        end = datetime.now(UTC)
        shape = shape or made_up(seed, end)
        load = Load(str(database), database.version)
        before = database.num_bytes()
        _record(database, load, shape, num_tokens, end, seed, tell)
        load.raw_bytes = database.num_bytes() - before
        since = end - timedelta(days=DAYS, seconds=-30)
        load.latencies_seconds = _ask(database, since, "before rolling up")
        begun = perf_counter()
        roll_up(database)
        load.rollup_seconds = perf_counter() - begun
        load.rollup_bytes = database.num_bytes() - before - load.raw_bytes
        database.analyze()
        load.latencies_seconds |= _ask(database, since, "rolled up")
        return load
    finally:
        gc.unfreeze()
        database.close()


def shape_of(url: str) -> list[Template]:
    """Return the requests that a database recorded last.

    Raises:
        RecordsError: there are none.
    """
    database = Database(url)
    try:
        database.check()
        found: list[Template] = list(recorded_requests(database))
    finally:
        database.close()
    if not found:
        raise RecordsError(f"{database} holds no steps to take the shape of. Leave out --shape.")
    return found


def _record(
    database: Database, load: Load, shape: Sequence[Template], num_tokens: int, end: datetime, seed: int, tell: Teller
) -> None:
    settings = RecordSettings(queue_rows=10**9, flush_seconds=0.05)
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(database, TraceStore(database, Path(folder), settings.held_out_share), settings)
        try:
            requests = chain(_first_hour(shape, end - timedelta(days=DAYS)), traffic(shape, num_tokens, end, seed))
            while chunk := list(islice(requests, _CHUNK_REQUESTS)):
                _write(writer, chunk, load)
                tell("record", f"{load.num_tokens:,} of {num_tokens:,} tokens")
        finally:
            writer.close()


def _first_hour(shape: Sequence[Template], begin: datetime) -> Iterator[Request]:
    """In every minute of an hour one step of each kind that the shape has."""
    found = {_kind(step): step for request in shape for step in request}
    for minute in range(60):
        at = begin + timedelta(minutes=minute)
        yield from (
            again([step], f"chatcmpl-f{minute:03x}{index:028x}", at) for index, step in enumerate(found.values())
        )


def _kind(step: Step) -> tuple[Any, ...]:
    reached = len(step.positions), sum(position.accepted for position in step.positions)
    return step.domain, step.drafter, step.verifier, step.policy, *reached


def _write(writer: Writer, chunk: Sequence[Request], load: Load) -> None:
    """Hand everything to the writer at once and wait until it is written."""
    begun, cpu = perf_counter(), process_time()
    for steps, finished in chunk:
        for step in steps:
            writer.on_step(step)
        writer.on_finish(finished)
    if not writer.flush(600) or writer.num_dropped:
        raise RecordsError("The writer lost rows. Look at the log above for what the database refused.")
    load.write_seconds += perf_counter() - begun
    load.write_cpu_seconds += process_time() - cpu
    load.num_requests += len(chunk)
    load.num_steps += sum(len(steps) for steps, _ in chunk)
    load.num_tokens += sum(finished.completion_tokens for _, finished in chunk)


def _ask(database: Database, since: datetime, when: str) -> dict[str, tuple[float, float]]:
    domain = list_domains(database)[0]
    return {
        f"30 days, {when}": _time(lambda: domain_statistics(database, since=since)),
        f"30 days of one domain, {when}": _time(lambda: domain_statistics(database, since=since, domain=domain)),
        f"everything, {when}": _time(lambda: domain_statistics(database)),
    }


def _time(ask: Callable[[], Any]) -> tuple[float, float]:
    seconds = []
    for _ in range(_REPEATS):
        sleep(_PAUSE_SECONDS)
        begun = perf_counter()
        ask()
        seconds.append(perf_counter() - begun)
    return min(seconds), median(seconds)
