"""Every trigger, and every reason why not now."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from adaptive_spec.learning.triggers import (
    AGE,
    AUTOMATIC,
    DRIFT,
    GAIN,
    VOLUME,
    Facts,
    decline,
    due,
    expected_gain_share,
)
from adaptive_spec.records.runs import RunGain
from adaptive_spec.settings import LearningSettings, ScheduleSettings

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
SCHEDULE = ScheduleSettings(min_new_traces=30, cooldown_hours=2)
LEARNING = LearningSettings(min_traces=50)
READY = Facts(active_run=None, num_traces=100, num_new_traces=40, learned_at=NOW - 9 * HOUR, last_run_at=NOW - 3 * HOUR)


def test_volume_and_age_are_off_by_default() -> None:
    assert due(READY, SCHEDULE, NOW) is None


def test_volume_calls_when_enough_is_new() -> None:
    schedule = SCHEDULE.model_copy(update={"retrain_new_traces": 40})
    assert due(READY, schedule, NOW) == VOLUME
    assert due(replace(READY, num_new_traces=39), schedule, NOW) is None


def test_age_calls_when_the_last_lesson_is_old_and_there_is_something_new() -> None:
    schedule = SCHEDULE.model_copy(update={"retrain_age_hours": 8})
    assert due(READY, schedule, NOW) == AGE
    assert due(replace(READY, learned_at=None), schedule, NOW) == AGE
    assert due(replace(READY, learned_at=NOW - 7 * HOUR), schedule, NOW) is None
    assert due(replace(READY, num_new_traces=0), schedule, NOW) is None


@pytest.mark.parametrize("trigger", [*AUTOMATIC, "person", "before the release party"])
def test_whoever_asks_may_begin_when_all_is_there(trigger: str) -> None:
    assert decline(trigger, READY, SCHEDULE, LEARNING, NOW) is None


@pytest.mark.parametrize("trigger", [*AUTOMATIC, "person"])
@pytest.mark.parametrize(
    ("facts", "kind", "told", "who"),
    [
        (replace(READY, active_run=4), "active", "run 4 is active", "everybody, forced or not"),
        (replace(READY, num_traces=49), "data", "49 traces are stored and learning.min_traces is 50", "everybody"),
        (replace(READY, num_new_traces=29), "data", "29 traces came since the last run", "automatic"),
        (replace(READY, last_run_at=NOW - HOUR), "cooldown", "began at 2026-03-01 11:00 UTC", "automatic"),
    ],
)
def test_not_now(trigger: str, facts: Facts, kind: str, told: str, who: str) -> None:
    found = decline(trigger, facts, SCHEDULE, LEARNING, NOW)
    if who == "automatic" and trigger == "person":
        assert found is None
    else:
        assert found is not None and found.kind == kind and told in found.reason
    forced = decline(trigger, facts, SCHEDULE, LEARNING, NOW, force=True)
    assert (forced is None) == (kind != "active")


def test_a_first_run_has_no_cool_down() -> None:
    assert decline("schedule", replace(READY, learned_at=None, last_run_at=None), SCHEDULE, LEARNING, NOW) is None


def after(*gains: RunGain, num_new_traces: int = 40) -> Facts:
    return replace(READY, gains=gains, num_new_traces=num_new_traces)


@pytest.mark.parametrize("trigger", [*AUTOMATIC, "person"])
def test_a_run_that_promises_too_little_waits_unless_drift_or_a_person_asks(trigger: str) -> None:
    facts = after(RunGain(num_new_traces=1000, gain_share=0.001, gain_share_high=0.005))
    found = decline(trigger, facts, SCHEDULE, LEARNING, NOW)
    if trigger in (DRIFT, "person"):
        assert found is None
    else:
        assert found is not None and found.kind == GAIN
        assert "40 new traces promise 0.02%" in found.reason
        assert "schedule.min_expected_gain_share is 0.50%" in found.reason
    assert decline(trigger, facts, SCHEDULE, LEARNING, NOW, force=True) is None
    assert decline(trigger, replace(facts, num_new_traces=1001), SCHEDULE, LEARNING, NOW) is None
    off = SCHEDULE.model_copy(update={"min_expected_gain_share": 0.0})
    assert decline(trigger, facts, off, LEARNING, NOW) is None


def test_the_better_of_the_last_runs_speaks() -> None:
    spoilt, good = RunGain(10, -0.2, -0.1), RunGain(500, 0.02, 0.03)
    assert expected_gain_share(after(spoilt, good, num_new_traces=50)) == pytest.approx(0.003)
    assert expected_gain_share(after(spoilt)) == 0.0
    assert expected_gain_share(after(RunGain(0, 0.1, 0.2))) is None, "a forced run without anything new says nothing"


def test_nothing_is_held_against_a_first_run() -> None:
    assert expected_gain_share(READY) is None
    assert decline("schedule", replace(READY, learned_at=None, last_run_at=None), SCHEDULE, LEARNING, NOW) is None


def test_a_run_of_a_clock_that_was_ahead_holds_nobody_until_then() -> None:
    facts = replace(READY, last_run_at=NOW + 100 * HOUR)
    assert decline("schedule", facts, SCHEDULE, LEARNING, NOW) is None
    soon = decline("schedule", replace(READY, last_run_at=NOW + HOUR), SCHEDULE, LEARNING, NOW)
    assert soon is not None and soon.kind == "cooldown"
