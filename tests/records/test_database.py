import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import MetaData, Table, inspect, select, text
from sqlalchemy import insert as insert_into
from sqlalchemy.exc import InterfaceError, OperationalError, StatementError

from adaptive_spec.errors import RecordsError
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import add_event, list_events
from adaptive_spec.records.tables import Base, EventRow, RequestRow, StepRow
from tests.records.rows import insert, make_step

COMMAND = "adaptive-spec db upgrade"


def test_upgrade_makes_exactly_the_schema_of_the_metadata(empty_database: Database) -> None:
    empty_database.upgrade()
    empty_database.upgrade()
    empty_database.check()
    with empty_database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_upgrade_makes_the_same_keys_and_indexes_by_name(empty_database: Database) -> None:
    empty_database.upgrade()
    inspector = inspect(empty_database.engine)
    for table in Base.metadata.sorted_tables:
        made = {index["name"] for index in inspector.get_indexes(table.name)}
        made |= {constraint["name"] for constraint in inspector.get_unique_constraints(table.name)}
        declared = {index.name for index in table.indexes}
        assert declared <= made, table.name
        assert inspector.get_pk_constraint(table.name)["name"] == f"pk_{table.name}"


def test_evidence_goes_and_comes_back_with_its_revision(empty_database: Database) -> None:
    database = empty_database
    database.upgrade()
    with database.engine.begin() as connection:
        config = database._config()
        config.attributes["connection"] = connection
        command.downgrade(config, "0005")
    assert "evidence" not in inspect(database.engine).get_table_names()
    database.upgrade()
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_steps_of_before_get_the_policy_of_their_requests(empty_database: Database) -> None:
    database = empty_database
    config = database._config()
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0007")
        for table, rows in (
            ("requests", [{"request_id": "a", "policy": "fixed"}]),
            ("steps", [{"id": 1, "request_id": "a"}, {"id": 2, "request_id": "runs"}]),
        ):
            there = Table(table, MetaData(), autoload_with=connection)
            connection.execute(insert_into(there), [{**_sample(there), **row} for row in rows])
    database.upgrade()
    with database.session_scope(read_only=True) as session:
        assert dict(session.execute(select(StepRow.id, StepRow.policy)).all()) == {1: "fixed", 2: ""}
        assert session.scalar(select(RequestRow.rolled_up)) is False
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0007")
    database.upgrade()
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def _sample(table: Table) -> dict[str, Any]:
    """Some value for every column."""
    some = {str: "x", int: 1, float: 1.0, bool: False, bytes: b"", datetime: datetime.now(UTC)}
    return {column.name: some.get(column.type.python_type, [1]) for column in table.columns}  # else JSON


def test_ids_are_settled_only_when_no_smaller_one_is_under_way(database: Database) -> None:
    settled: list[int] = []
    thread = threading.Thread(target=lambda: settled.append(database.settled_id(StepRow)))
    with database.session_scope() as writing:
        insert(database, writing, make_step())
        thread.start()
        thread.join(0.3)
        assert settled == ([0] if database.is_sqlite else [])  # SQLite numbers rows under the lock that it writes under
    thread.join()
    assert settled == [0 if database.is_sqlite else 1]
    assert database.settled_id(StepRow) == 1


def test_check_names_the_command_when_tables_are_missing(empty_database: Database) -> None:
    with pytest.raises(RecordsError, match=COMMAND):
        empty_database.check()


def test_unknown_revision_is_refused(empty_database: Database) -> None:
    database = empty_database
    database.upgrade()
    with database.session_scope() as session:
        session.execute(text("UPDATE alembic_version SET version_num = 'from_tomorrow'"))
    with pytest.raises(RecordsError, match="from_tomorrow"):
        database.check()
    with pytest.raises(RecordsError, match="newer version"):
        database.upgrade()


def test_upgrades_at_the_same_time_do_not_collide(empty_database: Database) -> None:
    errors: list[BaseException] = []

    def upgrade() -> None:
        other = Database(empty_database.url.render_as_string(hide_password=False))
        try:
            other.upgrade()
        except BaseException as error:
            errors.append(error)
        finally:
            other.close()

    threads = [threading.Thread(target=upgrade) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    empty_database.check()


def test_session_scope_rolls_back_on_error(database: Database) -> None:
    with pytest.raises(KeyError), database.session_scope() as session:
        session.add(EventRow(kind="x", detail={}, at=datetime.now().astimezone()))
        session.flush()
        raise KeyError
    assert list_events(database) == []


def test_naive_times_are_refused(database: Database) -> None:
    with pytest.raises(StatementError, match="aware"), database.session_scope() as session:
        session.add(EventRow(kind="x", detail={}, at=datetime(2026, 1, 1)))


def test_details_that_json_does_not_know_are_stored_as_null_or_text(database: Database) -> None:
    add_event(database, "x", {"loss": float("nan"), "folder": Path("a"), "many": [float("inf"), 1.5]})
    assert list_events(database)[0].detail == {"loss": None, "folder": "a", "many": [None, 1.5]}


def test_sqlite_runs_in_wal_mode_with_foreign_keys(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'a' / 'b.db'}")
    with database.session_scope(read_only=True) as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA foreign_keys")) == 1
        assert session.scalar(text("PRAGMA busy_timeout")) == 30_000
    database.close()


def test_sqlite_readers_do_not_wait_for_the_writer(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'b.db'}")
    database.upgrade()
    with database.session_scope() as writing:
        writing.add(EventRow(kind="x", detail={}, at=datetime.now().astimezone()))
        writing.flush()
        assert list_events(database) == []
    assert len(list_events(database)) == 1
    database.close()


def test_many_threads_may_write_to_sqlite(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'b.db'}")
    database.upgrade()
    threads = [
        threading.Thread(target=lambda: [add_event(database, "x", {}) for _ in range(10)] and None) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list_events(database)) == 40
    database.close()


@pytest.mark.parametrize("url", ["nonsense", "mysql://host/name"])
def test_bad_urls_are_refused(url: str) -> None:
    with pytest.raises(RecordsError):
        Database(url)


def test_an_unreachable_server_is_named_without_its_password(tmp_path: Path) -> None:
    database = Database(f"postgresql://me:secret@/name?host={tmp_path}")
    with pytest.raises(RecordsError, match=r"records\.url") as caught:
        database.check()
    assert "secret" not in str(caught.value)
    database.close()


def test_work_outlasts_an_outage_until_somebody_gives_up(database: Database) -> None:
    outcomes = iter([OperationalError("SELECT 1", {}, Exception("away")), InterfaceError("", {}, Exception("away")), 7])

    def work() -> int:
        if isinstance(outcome := next(outcomes), Exception):
            raise outcome
        return outcome

    assert database.outlast(work) == 7
    outcomes = iter([OperationalError("SELECT 1", {}, Exception("away")), 7])
    with pytest.raises(OperationalError):
        database.outlast(work, lambda: True)
    outcomes = iter([KeyError("not an outage"), 7])
    with pytest.raises(KeyError):
        database.outlast(work)


def test_the_clock_and_the_counts_of_the_server(database: Database) -> None:
    assert abs(database.clock_ahead_seconds()) < 5
    database.analyze()
