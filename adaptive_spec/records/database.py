"""The database: engine, unit of work, migrations.  Every other module of this room takes a ``Database``.

SQLite runs in WAL mode, so that readers and the one writer do not wait for each other; PostgreSQL goes through
psycopg 3.  Nobody outside this room opens a session.
"""

import json
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, func, make_url, select, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from sqlalchemy.util import immutabledict

from adaptive_spec.errors import RecordsError
from adaptive_spec.records.insertion import insert_rows
from adaptive_spec.records.locks import LockKey
from adaptive_spec.records.tables import Base
from adaptive_spec.redaction import hide_secrets

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

BUSY_TIMEOUT_MS = 30_000
_OUTAGE_RETRY_SECONDS = (0.1, 5.0)  # first and longest wait
_WAL_RETRY_SECONDS = 0.02
_PRAGMAS = (
    f"busy_timeout={BUSY_TIMEOUT_MS}",
    "synchronous=NORMAL",
    "foreign_keys=ON",
    "secure_delete=ON",
    "wal_autocheckpoint=4000",  # pages, 16 MB: the file is synced a quarter as often
)
UPGRADE_COMMAND = "adaptive-spec db upgrade"
_READ_ONLY = "adaptive_spec_read_only"
# A server that vanished without a word is noticed in seconds; by default TCP takes a quarter of an hour.
_NOTICE_LOSS = {
    "connect_timeout": 5,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 5_000,
}
_NOTICE_LOSS_THERE = "SET tcp_keepalives_idle = 2; SET tcp_keepalives_interval = 1; SET tcp_keepalives_count = 3"


def migrations_folder() -> Path:
    """Return the migrations: at the root of a checkout, inside the package in a wheel."""
    package = Path(__file__).resolve().parents[1]
    shipped = package / "_migrations"
    return shipped if shipped.is_dir() else package.parent / "migrations"


class Database:
    """One database.

    Args:
        url: a SQLAlchemy URL of a SQLite file or of PostgreSQL.

    Raises:
        RecordsError: the URL cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._shown = hide_secrets(url)
        try:
            self.url = make_url(url)
        except ArgumentError:
            # Not quoted, not even by its cause: where a password may be in it, nobody knows.
            raise RecordsError("Not a database URL. Use sqlite:///FILE or postgresql://HOST/NAME.") from None
        if self.url.get_backend_name() not in ("sqlite", "postgresql"):
            raise RecordsError(f"{self} is neither SQLite nor PostgreSQL. Set records.url to one of the two.")
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.engine = _sqlite_engine(self.url) if self.is_sqlite else _postgresql_engine(self.url)
        self.num_errors = 0  # of statements and connections, since this object was made
        event.listen(self.engine, "handle_error", self._count_error)

    def __str__(self) -> str:
        return self._shown

    @contextmanager
    def session_scope(self, *, read_only: bool = False) -> Iterator[Session]:
        """Run one unit of work: commit at the end, roll back on any error.

        On SQLite a unit that may write takes the write lock at once; one that read first and wrote later could
        fail although it waited.  ``read_only`` units take no lock and see the database as it is at their first query,
        so that several queries fit together.
        """
        options: dict[str, Any] = {_READ_ONLY: read_only}
        if read_only and not self.is_sqlite:
            options["isolation_level"] = "REPEATABLE READ"
        with Session(self.engine, expire_on_commit=False) as session, session.begin():
            session.connection(execution_options=immutabledict(options))
            yield session

    def outlast(self, work: Callable[[], Result], give_up: Callable[[], bool] = lambda: False) -> Result:
        """Do a unit of work, again and again while the database is away, and return its result.

        Args:
            give_up: asked after each failure whether to raise it instead.
        """
        wait_seconds, longest = _OUTAGE_RETRY_SECONDS
        while True:
            try:
                return work()
            except (OperationalError, InterfaceError) as error:
                if give_up():
                    raise
                logger.warning("the database %s is away, tried again in %.1f s: %s", self, wait_seconds, error)
            time.sleep(wait_seconds)
            wait_seconds = min(2 * wait_seconds, longest)

    def insert_new(self, session: Session, table: type[Base], rows: Sequence[dict[str, Any]]) -> None:
        """Insert rows, passing over those whose unique key is there already, so that a retry is harmless."""
        if rows:
            insert = sqlite.insert if self.is_sqlite else postgresql.insert
            session.execute(insert(table).on_conflict_do_nothing(), list(rows))

    def insert_many(self, session: Session, table: type[Base], columns: Mapping[str, Iterable[Any]]) -> None:
        """Do the same for many rows, given by column: name -> values."""
        self._number(session, exclusive=False)
        insert_rows(session, table, columns, _to_json)

    def clock_ahead_seconds(self) -> float:
        """Return how far this machine's clock is ahead of the database server's; of the file's own machine, 0."""
        if self.is_sqlite:
            return 0.0
        with self.engine.connect() as connection:
            there: datetime = connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
        return (datetime.now(UTC) - there).total_seconds()

    def analyze(self) -> None:
        """Count for the planner what the tables hold, as PostgreSQL does by itself within a minute or so."""
        with self.engine.connect() as connection:
            connection.exec_driver_sql("ANALYZE")
            connection.commit()

    def settled_id(self, table: type[Base]) -> int:
        """Return the largest id of a table so that no row with a smaller one can still appear; 0 of an empty one.

        PostgreSQL numbers rows before they are committed.  So whoever inserts shares a lock that this waits for: as
        long as the batches take that are being written.
        """
        with self.session_scope(read_only=self.is_sqlite) as session:
            self._number(session, exclusive=True)
            return session.scalar(select(func.max(table.__table__.c.id))) or 0

    def _number(self, session: Session, *, exclusive: bool) -> None:
        if not self.is_sqlite:
            lock = "pg_advisory_xact_lock" if exclusive else "pg_advisory_xact_lock_shared"
            session.execute(text(f"SELECT {lock}(:key)"), {"key": LockKey.NUMBER.value})

    @property
    def version(self) -> str:
        """The database's name and version."""
        with self.session_scope(read_only=True) as session:
            if self.is_sqlite:
                return f"SQLite {session.scalar(text('SELECT sqlite_version()'))}"
            return f"PostgreSQL {session.scalar(text('SHOW server_version'))}"

    def num_bytes(self) -> int:
        """Return what tables and indexes take on the disk, the logs left out."""
        with self.session_scope(read_only=True) as session:
            if not self.is_sqlite:
                return session.scalar(text("SELECT pg_database_size(current_database())")) or 0
            pages = [session.scalar(text(f"PRAGMA {name}")) or 0 for name in ("page_count", "page_size")]
            return int(pages[0] * pages[1])

    def clock(self, session: Session) -> datetime:
        """Return the database's own time, so that ages hang on nobody else's clock.

        SQLite has none but that of its machine, which all its processes share.
        """
        return datetime.now(UTC) if self.is_sqlite else session.scalars(select(func.clock_timestamp())).one()

    def take_turns(self, session: Session, key: LockKey) -> None:
        """Let one unit of work of this key run at a time; on SQLite all that write take turns anyhow."""
        if not self.is_sqlite:
            session.execute(select(func.pg_advisory_xact_lock(key.value)))

    def dedicated(self) -> Connection:
        """Return a PostgreSQL connection of the caller's own, outside the pool, each statement a transaction.

        For what lives as long as its connection: locks of a session, and listening.  When this process or its machine
        is gone, the server notices within seconds and lets go of both.  ``invalidate`` closes it without a word to a
        server that may be gone itself.
        """
        connection = self._apart.connect()
        try:
            connection.exec_driver_sql(_NOTICE_LOSS_THERE)
        except BaseException:
            connection.invalidate()
            raise
        return connection

    def settle(self, *, scrub: bool = False) -> None:
        """Bring what was committed to the disk, so that not even a power cut takes it back.

        PostgreSQL has done so by itself; SQLite, as it is set up here, leaves it to the next checkpoint of its log.

        Args:
            scrub: also overwrite what deleted rows left in that log, waiting for readers who still need it.  In the
                file itself they are zeroed as they go; PostgreSQL gives their space back by vacuum.
        """
        if self.is_sqlite:
            connection = self.engine.raw_connection()
            try:
                connection.cursor().execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if scrub else 'PASSIVE'})")
            finally:
                connection.close()

    def upgrade(self) -> None:
        """Bring the schema to the newest revision.  Safe to call from several processes at once.

        Raises:
            RecordsError: the database cannot be reached or was made by a newer version.
        """
        try:
            with self.engine.begin() as connection:
                if not self.is_sqlite:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LockKey.UPGRADE.value})
                self._refuse_unknown(self._revision(connection))
                config = self._config()
                config.attributes["connection"] = connection
                command.upgrade(config, "head")
        except SQLAlchemyError as error:
            raise self._unreachable(error) from error

    def check(self) -> None:
        """Make sure that the schema is the one this version expects.

        Raises:
            RecordsError: it is not, or the database cannot be reached.
        """
        try:
            with self.engine.connect().execution_options(**{_READ_ONLY: True}) as connection:
                revision = self._revision(connection)
        except SQLAlchemyError as error:
            raise self._unreachable(error) from error
        if revision is None:
            raise RecordsError(f"The database {self} has no tables yet. Run `{UPGRADE_COMMAND}`.")
        self._refuse_unknown(revision)
        head = ScriptDirectory.from_config(self._config()).get_current_head()
        if revision != head:
            raise RecordsError(f"The database {self} is at revision {revision}, not {head}. Run `{UPGRADE_COMMAND}`.")

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    @cached_property
    def _apart(self) -> Engine:
        """Makes connections that are not pooled, and not rolled back when they are closed."""
        return _postgresql_engine(self.url, poolclass=NullPool, isolation_level="AUTOCOMMIT", pool_reset_on_return=None)

    def _count_error(self, context: ExceptionContext) -> None:
        self.num_errors += 1

    def _config(self) -> Config:
        config = Config()
        config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        return config

    def _revision(self, connection: Connection) -> str | None:
        return MigrationContext.configure(connection).get_current_revision()

    def _refuse_unknown(self, revision: str | None) -> None:
        known = {script.revision for script in ScriptDirectory.from_config(self._config()).walk_revisions()}
        if revision is not None and revision not in known:
            raise RecordsError(
                f"The database {self} has the unknown revision {revision}: a newer version made it. "
                f"Update adaptive-spec, or point records.url at another database and run `{UPGRADE_COMMAND}`."
            )

    def _unreachable(self, error: SQLAlchemyError) -> RecordsError:
        reason = hide_secrets(str(getattr(error, "orig", None) or error).strip())
        return RecordsError(f"The database {self} cannot be used: {reason}. Check records.url and that it is running.")


def _sqlite_engine(url: Any) -> Engine:
    if url.database and url.database != ":memory:":
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, json_serializer=_to_json, hide_parameters=True)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver's own BEGIN comes too late; _begin below sends it
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        _turn_to_wal(connection)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _turn_to_wal(connection: Any) -> None:
    """Switch to WAL, once per file.  SQLite does not wait for other connections here as it does elsewhere."""
    deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_WAL_RETRY_SECONDS)


def _postgresql_engine(url: Any, **options: Any) -> Engine:
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    noticing = {name: value for name, value in _NOTICE_LOSS.items() if name not in url.query}
    shared = {"json_serializer": _to_json, "hide_parameters": True}  # errors and logs quote no rows
    return create_engine(url, pool_pre_ping=True, connect_args=noticing, **shared, **options)


def _to_json(value: Any) -> str:
    """Write JSON that both databases take: numpy numbers become numbers, NaN and infinities null."""
    try:
        return json.dumps(value, default=_plain, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(json.loads(json.dumps(value, default=_plain))))


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
