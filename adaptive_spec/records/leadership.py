"""The lock of the process that leads: at most one holds it, and it is free again when that process is gone.

Nothing has to expire, so nothing hangs on clocks: PostgreSQL frees an advisory lock with the session that took it, the
operating system a file lock with the process.
"""

import fcntl
import os
from pathlib import Path
from typing import Protocol

from sqlalchemy import Connection, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.records.database import Database
from adaptive_spec.records.locks import LockKey


class LeaderLock(Protocol):
    """Held by one process at a time.  Not for several threads."""

    def hold(self) -> bool:
        """Take the lock if it is free, or make sure that it still is ours; return whether it is.  Never waits for it.

        Raises:
            SQLAlchemyError, OSError: that cannot be said.  The lock is not ours any more.
        """

    def release(self) -> None:
        """Let it go; harmless when it is not held."""


def leader_lock(database: Database) -> LeaderLock:
    """Return the lock of everybody who uses this database."""
    if not database.is_sqlite:
        return AdvisoryLock(database)
    file = database.url.database
    return FileLock(Path(f"{file}.leader") if file and file != ":memory:" else None)


class AdvisoryLock:
    """PostgreSQL: an advisory lock of a session that does nothing else."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: Connection | None = None
        self._held = False

    def hold(self) -> bool:
        """As ``LeaderLock.hold``: a session that answers still has what it took."""
        try:
            if self._connection is None:
                self._connection = self._database.dedicated()
            if self._held:
                self._connection.execute(text("SELECT 1"))
            else:
                self._held = bool(self._connection.scalar(select(func.pg_try_advisory_lock(LockKey.LEAD.value))))
        except SQLAlchemyError:
            self.release()
            raise
        return self._held

    def release(self) -> None:
        """End the session, and the lock with it."""
        connection, self._connection, self._held = self._connection, None, False
        if connection is not None:
            connection.invalidate()


class FileLock:
    """SQLite: a lock on a file beside the database.

    Args:
        path: the file, which stays; None: the database is this process's alone, and so is the lead.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: int | None = None

    def hold(self) -> bool:
        """As ``LeaderLock.hold``."""
        if self._path is None or self._file is not None:
            return True
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        except OSError:
            os.close(file)
            raise
        self._file = file
        return True

    def release(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)
