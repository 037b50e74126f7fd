"""LISTEN and NOTIFY: who waits for something in the database hears of it at once, where the database is PostgreSQL.

A word without content: that something has changed is all it says, what that is is read from the rows.  So none that is
lost does harm, and whoever listens also looks by itself now and then.
"""

import logging
import threading
from collections.abc import Callable

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from adaptive_spec.records.database import Database

logger = logging.getLogger(__name__)

_CHANNEL = "adaptive_spec"
_RETRY_SECONDS = 1.0
_LOOK_SECONDS = 0.5  # how often a listener looks whether it should stop


def notify(session: Session) -> None:
    """Tell everybody who listens, once this unit of work is committed.  On SQLite, nobody does."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_notify(_CHANNEL, "")))


class Listener:
    """Listens on a connection and a thread of its own, and connects again when the database was away.

    Args:
        heard: called at every notification, and at every connection, for what was missed before it.
    """

    def __init__(self, database: Database, heard: Callable[[], None]) -> None:
        self._database = database
        self._heard = heard
        self._told = False  # that notifications do not arrive
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)

    def start(self) -> None:
        """Listen from now on; does nothing on SQLite."""
        if not self._database.is_sqlite:
            self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        import psycopg  # an extra: only who has a PostgreSQL has it

        while not self._stopping.is_set():
            try:
                self._listen()
            except (SQLAlchemyError, psycopg.Error, OSError) as error:
                if not self._told:
                    logger.warning("notifications do not arrive, polling goes on: %s", error)
                self._told = True
                self._stopping.wait(_RETRY_SECONDS)

    def _listen(self) -> None:
        """Listen until the connection breaks, which raises, or somebody says stop."""
        connection = self._database.dedicated()
        try:
            connection.exec_driver_sql(f"LISTEN {_CHANNEL}")
            self._told = False
            self._heard()
            driver = connection.connection.driver_connection
            while not self._stopping.is_set():
                for _ in driver.notifies(timeout=_LOOK_SECONDS, stop_after=1):  # type: ignore[union-attr]
                    self._heard()
        finally:
            connection.invalidate()
