"""The list of processes: ages on the database's clock, gone ones shown, then forgotten."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo

import pytest
from sqlalchemy import delete

from adaptive_spec.records import database as database_module
from adaptive_spec.records.database import Database
from adaptive_spec.records.decoders import Sign, forget_gone, give_sign, list_decoders, withdraw
from adaptive_spec.records.tables import DecoderRow

SIGN = Sign("a", "host", 7, "all", "http://host:8000", "1", 3, {"draft": "d"}, True)


def silence(database: Database, decoder_id: str, seconds: float) -> None:
    with database.session_scope() as session:
        row = session.get(DecoderRow, decoder_id)
        assert row is not None
        row.heartbeat_at -= timedelta(seconds=seconds)


def test_a_process_comes_lives_and_leaves(database: Database) -> None:
    give_sign(database, SIGN)
    (first,) = list_decoders(database, 10)
    assert (first.id, first.pid, first.release, first.hashes, first.state) == ("a", 7, 3, {"draft": "d"}, "leads")
    assert first.started_at == first.heartbeat_at and first.age_seconds < 10
    give_sign(database, replace(SIGN, release=4, leads=False))
    (then,) = list_decoders(database, 10)
    assert (then.release, then.state, then.started_at) == (4, "follows", first.started_at)
    assert then.heartbeat_at >= first.heartbeat_at
    withdraw(database, "a")
    assert list_decoders(database, 10) == []


def test_a_silent_process_is_gone_and_later_forgotten_until_it_comes_back(database: Database) -> None:
    give_sign(database, SIGN)
    give_sign(database, replace(SIGN, id="b", leads=False))
    silence(database, "a", 60)
    states = {decoder.id: decoder.state for decoder in list_decoders(database, 10)}
    assert states == {"a": "gone", "b": "follows"}
    forget_gone(database, timedelta(minutes=2))
    assert len(list_decoders(database, 10)) == 2
    forget_gone(database, timedelta(seconds=30))
    assert [decoder.id for decoder in list_decoders(database, 10)] == ["b"]
    give_sign(database, SIGN)
    assert len(list_decoders(database, 10)) == 2


def test_the_last_to_say_so_leads(database: Database) -> None:
    for name in ("a", "b"):
        give_sign(database, replace(SIGN, id=name))
    assert {decoder.id: decoder.state for decoder in list_decoders(database, 10)} == {"a": "follows", "b": "leads"}


def test_a_wrong_clock_makes_nobody_gone(migrated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fast(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Fast":
            return super().now(tz) + timedelta(hours=3)

    database = Database(migrated)
    with database.session_scope() as session:
        session.execute(delete(DecoderRow))
    monkeypatch.setattr(database_module, "datetime", Fast)
    give_sign(database, SIGN)
    (seen,) = list_decoders(database, 10)
    assert seen.state == "leads" and abs(seen.started_at - datetime.now(UTC)) < timedelta(minutes=1)
    silence(database, "a", 60)
    assert list_decoders(database, 10)[0].state == "gone"
    database.close()
