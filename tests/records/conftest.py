"""Both databases, for real: a SQLite file and a PostgreSQL server of the test session's own."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from adaptive_spec.records.database import Database
from adaptive_spec.records.tables import Base
from tests.postgresql import PostgreSQL


@pytest.fixture(scope="session")
def postgresql(postgresql_server: PostgreSQL) -> Callable[[], str]:
    """Create empty databases on a real server."""
    return postgresql_server.create


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
