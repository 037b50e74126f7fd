"""How many rows are inserted at once, by what each database takes fastest.  Called by ``Database.insert_many``.

SQLite gets one prepared statement for all rows, PostgreSQL a COPY; values are turned into the driver's by column, once
per batch, instead of by the ORM once per row and value.  `docs/operations.md` has the numbers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from sqlalchemy import JSON, Boolean, ColumnElement, Double, Integer
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from adaptive_spec.records.tables import Base, Packed, UtcDateTime

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def insert_rows(
    session: Session, table: type[Base], columns: Mapping[str, Iterable[Any]], to_json: Callable[[Any], str]
) -> None:
    """Insert rows, passing over those whose unique key is there already.

    Args:
        columns: name -> its values, equally many of each.
        to_json: writes what goes into a JSON column.

    Raises:
        SQLAlchemyError: the database does not answer, or refuses a row.
        Exception: a value is not of its column's kind.
    """
    connection = session.connection()
    is_sqlite = connection.dialect.name == "sqlite"
    converted = [
        _driver_values(table.__table__.c[name], values, is_sqlite, to_json) for name, values in columns.items()
    ]
    rows = list(zip(*converted, strict=True))
    names = ", ".join(f'"{name}"' for name in columns)
    if is_sqlite:
        places = ", ".join("?" * len(columns))
        connection.exec_driver_sql(
            f"INSERT INTO {table.__tablename__} ({names}) VALUES ({places}) ON CONFLICT DO NOTHING", rows
        )
    else:
        _copy(session, table.__tablename__, names, rows)


def _copy(session: Session, table: str, names: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """COPY cannot pass over a row.  One that is there already, after a retry, is found out by the server, which takes
    nothing then; all rows go through a table of the connection's own instead.
    """
    import psycopg

    driver: Any = session.connection().connection.driver_connection
    try:
        with driver.cursor() as cursor:
            try:
                with session.begin_nested():
                    _fill(cursor, table, names, rows)
            except psycopg.errors.UniqueViolation:
                cursor.execute(
                    f"CREATE TEMPORARY TABLE IF NOT EXISTS new_{table} ON COMMIT DELETE ROWS AS "
                    f"SELECT {names} FROM {table} WITH NO DATA"
                )
                _fill(cursor, f"new_{table}", names, rows)
                cursor.execute(f"INSERT INTO {table} ({names}) SELECT {names} FROM new_{table} ON CONFLICT DO NOTHING")
    except psycopg.OperationalError as error:
        raise OperationalError(f"COPY {table}", None, error) from error


def _fill(cursor: Any, table: str, names: str, rows: Sequence[tuple[Any, ...]]) -> None:
    with cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def _driver_values(
    column: ColumnElement[Any], values: Iterable[Any], is_sqlite: bool, to_json: Callable[[Any], str]
) -> list[Any]:
    """The values of one column as the driver takes them; numpy's numbers become Python's."""
    convert = _conversion(column, is_sqlite, to_json)
    if convert is None:
        return list(values)
    if column.nullable:
        return [None if value is None else convert(value) for value in values]
    return list(map(convert, values))


def _conversion(
    column: ColumnElement[Any], is_sqlite: bool, to_json: Callable[[Any], str]
) -> Callable[[Any], Any] | None:
    """Python's ``sqlite3`` takes bool and bytes too, by a detour that costs more than all else about a value."""
    match column.type:
        case Packed(pack=pack):
            return (lambda value: bytearray(pack(value))) if is_sqlite else pack
        case UtcDateTime():
            return _sqlite_time if is_sqlite else None
        case JSON():
            return to_json
        case Integer():
            return int
        case Double():
            return float
        case Boolean():
            return int if is_sqlite else bool
    return None


def _sqlite_time(at: datetime) -> str:
    """As SQLAlchemy stores it: UTC, without the zone, always with microseconds."""
    since = at - _EPOCH
    return f"{_to_the_second(since.days, since.seconds)}.{since.microseconds:06}"


@lru_cache(maxsize=4096)
def _to_the_second(days: int, seconds: int) -> str:
    return (_EPOCH + timedelta(days, seconds)).replace(tzinfo=None).isoformat(" ")
