"""The real service on both databases, under traffic, with what a fault needs to be made."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from adaptive_spec.core import Trace
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import EventRecord, list_events
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import ModelSettings
from tests.conftest import byte_tokenizer, noisy, tiny_model
from tests.faults.bundles import save_adapter
from tests.faults.traces import honest_traces
from tests.faults.traffic import MAX_TOKENS, Traffic, said_by_the_target_alone
from tests.postgresql import PostgreSQL
from tests.process import call, environment_of, start, stop, until

BACKENDS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.faults)]  # `make test` runs the first alone
INSIDE = Path(__file__).parent / "inside"


@dataclass(frozen=True)
class Models:
    """The tiny pair on disk, an adapter of its draft, and what the target says to every prompt."""

    folder: Path
    pair: ModelPair
    adapter: Path
    answers: dict[str, str]


class Place:
    """A database, a folder of releases and one of traces; services may start there one after the other."""

    def __init__(self, folder: Path, url: str, models: Models) -> None:
        self.folder, self.database_url, self.models = folder, url, models
        self.database = Database(url)
        self.log = folder / "log"
        self._environment, self.port = environment_of(
            folder,
            models.folder,
            RECORDS__URL=url,
            RELEASES__POLL_SECONDS=0.1,
            LEARNING__MIN_TRACES=10,
            LEARNING__MAX_EPOCHS=2,
            SCHEDULE__RETRAIN_HOURS=0,
            SCHEDULE__CALIBRATE_HOURS=0,
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def beside(self) -> "Place":
        """Where another service may run on the same database and folders."""
        return Place(self.folder, self.database_url, self.models)

    @property
    def releases(self) -> Path:
        return self.folder / "releases"

    @contextmanager
    def serving(self, **settings: Any) -> Iterator[Any]:
        """Run the service and yield its process; whatever is left of it at the end is stopped.

        Args:
            settings: variables of its environment; those with FAULT in their name are for ``inside``.
        """
        named = {name if "FAULT" in name else f"ADAPTIVE_SPEC_{name}": str(value) for name, value in settings.items()}
        path = os.pathsep.join([str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = start({**self._environment, **named, "PYTHONPATH": path}, self.port, self.log)
        try:
            yield process
        finally:
            stop(process)

    def store_traces(self, traces: Sequence[Trace] = ()) -> None:
        """Put traces into the store as the writer does; some honest ones where none are given."""
        store = TraceStore(self.database, self.folder / "traces", 0.2)
        store.add(traces or honest_traces(self.models.pair, 60, "a", seed=1))

    def live(self) -> int:
        """The release that the service runs."""
        version: int = call(f"{self.url}/api/thresholds")["release"]
        return version

    def follows(self, version: int) -> None:
        """Wait until the service runs a release."""
        until(lambda: self.live() == version)

    def run(self, run_id: int) -> dict[str, Any]:
        """A training run as the service tells of it."""
        return call(f"{self.url}/api/runs/{run_id}")

    def recorded_tokens(self) -> dict[str, int]:
        """Tokens that the steps of each finished request on record have emitted."""
        query = text(
            "SELECT requests.request_id, SUM(num_emitted) FROM requests JOIN steps "
            "ON steps.request_id = requests.request_id GROUP BY requests.request_id"
        )
        with self.database.session_scope(read_only=True) as session:
            return {request_id: int(tokens) for request_id, tokens in session.execute(query)}

    def check_records(self, traffic: Traffic) -> None:
        """Every request that was answered is on record, with every token."""
        recorded = self.recorded_tokens()
        lost = [request_id for request_id in traffic.answered if recorded.get(request_id) != MAX_TOKENS]
        assert lost == [], f"{len(lost)} of {len(traffic.answered)} requests"

    def events(self, kind: str, release: int | None = None) -> list[EventRecord]:
        """The events of a kind, of one release where one is named."""
        found = list_events(self.database, 10_000, kind)
        return [event for event in found if release in (None, event.release)]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("target", tiny_model(0)), ("draft", noisy(tiny_model(0)))):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    pair = load_pair(ModelSettings(target=str(folder / "target"), draft=str(folder / "draft")))
    adapter = save_adapter(pair.draft, folder / "adapter")
    return Models(folder, pair, adapter, said_by_the_target_alone(folder / "target"))


@pytest.fixture(scope="session")
def make_place(
    models: Models, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], Place]]:
    """Make a place on ``sqlite`` or ``postgresql``."""
    made: list[Place] = []

    def make(backend: str) -> Place:
        folder = tmp_path_factory.mktemp("place")
        if backend == "sqlite":
            url = f"sqlite:///{folder / 'records.db'}"
        else:
            server: PostgreSQL = request.getfixturevalue("postgresql_server")
            url = server.create()
        made.append(Place(folder, url, models))
        made[-1].database.upgrade()
        return made[-1]

    yield make
    for place in made:
        place.database.close()


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, make_place: Callable[[str], Place]) -> Place:
    return make_place(request.param)


@pytest.fixture
def make_empty(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Make a database without tables and return its URL."""
    numbers = itertools.count()

    def make(backend: str) -> str:
        if backend == "sqlite":
            return f"sqlite:///{tmp_path / f'{next(numbers)}.db'}"
        server: PostgreSQL = request.getfixturevalue("postgresql_server")
        return server.create()

    return make
