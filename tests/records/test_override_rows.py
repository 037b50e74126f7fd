"""Thresholds set by hand: one per domain, on record, and gone when their time is up."""

from datetime import timedelta

from sqlalchemy import select

from adaptive_spec.core import ThresholdOverride
from adaptive_spec.records.database import Database
from adaptive_spec.records.events import list_events
from adaptive_spec.records.overrides import clear_override, end_expired, set_override, standing_overrides
from adaptive_spec.records.tables import ThresholdOverrideRow

HOUR = timedelta(hours=1)


def pass_time(database: Database, by: timedelta) -> None:
    with database.session_scope() as session:
        for row in session.scalars(select(ThresholdOverrideRow)):
            row.until -= by


def test_an_override_stands_until_it_is_replaced_or_cleared(database: Database) -> None:
    set_override(database, "code", ThresholdOverride(stop_below=0.7), "slow", HOUR)
    set_override(database, "law", ThresholdOverride(max_chain_length=0), "broken", HOUR)
    set_override(database, "code", ThresholdOverride(temperature=2.0), "slower", 2 * HOUR)
    code, law = standing_overrides(database)
    assert (code.domain, code.override, code.reason) == ("code", ThresholdOverride(temperature=2.0), "slower")
    assert law.override == ThresholdOverride(max_chain_length=0)  # 0 is a number, not nothing
    assert code.until - code.begun_at == 2 * HOUR and 7100 < code.seconds_left <= 7200
    assert clear_override(database, "code", "fine again") and not clear_override(database, "code", "again")
    assert [each.domain for each in standing_overrides(database)] == ["law"]
    restored, replaced, *_ = (event for event in list_events(database) if event.domain == "code")
    assert (restored.kind, restored.detail["reason"]) == ("thresholds_restored", "fine again")
    assert (replaced.kind, replaced.detail["before"]) == ("thresholds_overridden", {"stop_below": 0.7})


def test_an_expired_one_is_in_force_nowhere_and_told_once(database: Database) -> None:
    set_override(database, "code", ThresholdOverride(stop_below=0.7), "slow", HOUR)
    end_expired(database)
    assert len(standing_overrides(database)) == 1
    pass_time(database, 2 * HOUR)
    assert standing_overrides(database) == [] and not clear_override(database, "code", "late")
    end_expired(database)
    end_expired(database)
    (told,) = list_events(database, kind="thresholds_restored")
    assert told.detail == {"numbers": {"stop_below": 0.7}, "reason": "expired"}
