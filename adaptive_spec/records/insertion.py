"""How many rows are inserted at once, by what each database takes fastest.  Called by ``Database.insert_new``.

SQLite gets one prepared statement for all rows, PostgreSQL a COPY; values are turned into the driver's by column once
per batch instead of by the ORM once per row and value.  `docs/operations.md` has the numbers.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from adaptive_spec.records.tables import Base, Packed, UtcDateTime

Convert = Callable[[Any], Any]


def insert_rows(session: Session, table: type[Base], rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows that all have the same columns, passing over those whose unique key is there already.

    Raises:
        SQLAlchemyError: the database does not answer, or refuses a row.
        Exception: the driver refuses a value.
    """
    names = list(rows[0])
    connection = session.connection()
    is_sqlite = connection.dialect.name == "sqlite"
    values = _values(table, names, rows, is_sqlite)
    if is_sqlite:
        places = ", ".join("?" * len(names))
        connection.exec_driver_sql(
            f"INSERT INTO {table.__tablename__} ({_quoted(names)}) VALUES ({places}) ON CONFLICT DO NOTHING", values
        )
    else:
        _copy(connection.connection.driver_connection, table.__tablename__, _quoted(names), values)


def _copy(driver: Any, table: str, names: str, values: Sequence[tuple[Any, ...]]) -> None:
    """COPY cannot pass over a row, so it fills a table of the connection's own first."""
    import psycopg

    try:
        with driver.cursor() as cursor:
            cursor.execute(
                f"CREATE TEMPORARY TABLE IF NOT EXISTS new_{table} ON COMMIT DELETE ROWS AS "
                f"SELECT {names} FROM {table} WITH NO DATA"
            )
            with cursor.copy(f"COPY new_{table} ({names}) FROM STDIN") as copy:
                for row in values:
                    copy.write_row(row)
            cursor.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM new_{table} ON CONFLICT DO NOTHING")
    except psycopg.OperationalError as error:
        raise OperationalError(f"COPY {table}", None, error) from error


def _values(
    table: type[Base], names: Sequence[str], rows: Sequence[dict[str, Any]], is_sqlite: bool
) -> list[tuple[Any, ...]]:
    """The rows as the driver takes them."""
    kinds = [table.__table__.c[name].type for name in names]
    special: list[tuple[int, Convert]] = [(i, kind.pack) for i, kind in enumerate(kinds) if isinstance(kind, Packed)]
    if is_sqlite:
        special += [(i, _sqlite_time) for i, kind in enumerate(kinds) if isinstance(kind, UtcDateTime)]
    pick = itemgetter(*names)
    found = []
    for row in rows:
        values = list(pick(row))
        for index, convert in special:
            values[index] = convert(values[index])
        found.append(tuple(values))
    return found


def _sqlite_time(at: datetime) -> str:
    """As SQLAlchemy stores it: UTC, without the zone, always with microseconds."""
    return (at if at.tzinfo is UTC else at.astimezone(UTC)).isoformat(" ", "microseconds")[:26]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
