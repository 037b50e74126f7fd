"""Every revision, up and down, with rows in every table, on both databases."""

from datetime import UTC, datetime
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Column, MetaData, inspect, select, text

from adaptive_spec.errors import RecordsError
from adaptive_spec.records.database import Database, migrations_folder
from adaptive_spec.records.tables import Base
from adaptive_spec.service import Service
from adaptive_spec.settings import load_settings

REVISIONS = [script.revision for script in ScriptDirectory(str(migrations_folder())).walk_revisions()][::-1]
VALUES = {
    int: 1,
    bool: True,
    float: 0.5,
    str: "x",
    bytes: b"",
    datetime: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    dict: {"a": 1},  # JSON, as is object in later versions of SQLAlchemy
    object: {"a": 1},
}
OF_COLUMNS: dict[str, Any] = {"releases": [0], "survival": [1.0, 0.5], "thresholds": {"temperature": 2.0}}
Rows = dict[str, dict[str, Any]]


def go_to(database: Database, revision: str) -> None:
    """Migrate up or down."""
    with database.engine.begin() as connection:
        config = database._config()
        config.attributes["connection"] = connection
        now = MigrationContext.configure(connection).get_current_revision() or ""
        (command.upgrade if revision != "base" and revision > now else command.downgrade)(config, revision)


def fill(database: Database) -> None:
    """Insert a row into every table as it is at the present revision."""
    metadata = MetaData()
    metadata.reflect(database.engine)
    with database.engine.begin() as connection:
        for table in metadata.sorted_tables:
            if table.name != "alembic_version":
                connection.execute(table.insert().values({column.name: _value(column) for column in table.columns}))


def rows_of(database: Database) -> Rows:
    """The one row of every table that has one, by the table's name."""
    metadata = MetaData()
    metadata.reflect(database.engine)
    with database.engine.connect() as connection:
        found = {table.name: connection.execute(table.select()).mappings().all() for table in metadata.sorted_tables}
    return {name: dict(rows[0]) for name, rows in found.items() if rows and name != "alembic_version"}


def drift_of(database: Database) -> list[Any]:
    with database.engine.connect() as connection:
        return list(
            compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), Base.metadata)
        )


def _value(column: Column[Any]) -> Any:
    return OF_COLUMNS[column.name] if column.name in OF_COLUMNS else VALUES[column.type.python_type]


def _common(before: Rows, after: Rows) -> tuple[Rows, Rows]:
    """Both, reduced to tables and columns that either has."""
    tables = before.keys() & after.keys()
    names = {table: before[table].keys() & after[table].keys() for table in tables}
    first, second = ({t: {c: rows[t][c] for c in names[t]} for t in tables} for rows in (before, after))
    return first, second


def test_revisions_are_one_line() -> None:
    script = ScriptDirectory(str(migrations_folder()))
    assert script.get_heads() == REVISIONS[-1:] and script.get_bases() == REVISIONS[:1]


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_rows_survive_the_upgrade_from_every_revision(empty_database: Database, revision: str) -> None:
    database = empty_database
    go_to(database, revision)
    fill(database)
    before = rows_of(database)
    assert len(before) >= 7
    database.upgrade()
    database.check()
    after = rows_of(database)
    assert before.keys() <= after.keys()
    first, second = _common(before, after)
    assert first == second
    assert drift_of(database) == []
    with database.session_scope(read_only=True) as session:
        for mapper in Base.registry.mappers:
            found = session.scalars(select(mapper.class_)).all()
            assert len(found) == (mapper.local_table.name in before)  # the package reads what old versions wrote


def test_a_filled_database_goes_all_the_way_down_and_up(empty_database: Database) -> None:
    database = empty_database
    database.upgrade()
    fill(database)
    for revision in (*REVISIONS[-2::-1], "base"):
        before = rows_of(database)
        go_to(database, revision)
        first, second = _common(before, rows_of(database))
        assert first == second
    assert set(inspect(database.engine).get_table_names()) <= {"alembic_version"}
    database.upgrade()
    assert drift_of(database) == []


def test_what_thresholds_were_is_in_the_one_value_that_they_are_now(empty_database: Database) -> None:
    go_to(empty_database, "0004")
    fill(empty_database)
    empty_database.upgrade()
    thresholds = rows_of(empty_database)["calibrations"]["thresholds"]
    assert (thresholds["temperature"], thresholds["survival"]) == (0.5, [1.0, 0.5])


def test_a_service_does_not_start_on_an_unknown_revision(empty_database: Database) -> None:
    empty_database.upgrade()
    with empty_database.session_scope() as session:
        session.execute(text("UPDATE alembic_version SET version_num = 'from_tomorrow'"))
    url = empty_database.url.render_as_string(hide_password=False)
    service = Service(load_settings({"records": {"url": url}}))
    with pytest.raises(RecordsError, match=r"from_tomorrow.*adaptive-spec db upgrade"):
        service.start()
    service.stop()
