"""When a training run makes sense.  Pure: facts and settings in, a decision out.

Triggers are ``schedule`` (an interval), ``volume`` (new traces), ``age`` (of what was learned last), ``drift``, and
whatever a person writes.  Called by the service, which records every "not now".
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from adaptive_spec.settings import LearningSettings, ScheduleSettings

SCHEDULE, VOLUME, AGE, DRIFT = "schedule", "volume", "age", "drift"
AUTOMATIC = (SCHEDULE, VOLUME, AGE, DRIFT)
ACTIVE, DATA, COOLDOWN = "active", "data", "cooldown"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the records say.

    active_run: its number.  num_traces: to train on, held-out ones left out; num_new_traces: of them, those that came
    after the last run began that learned to its end.  learned_at: when that was.  last_run_at: when any run last began.
    """

    active_run: int | None
    num_traces: int
    num_new_traces: int
    learned_at: datetime | None
    last_run_at: datetime | None


@dataclass(frozen=True, slots=True)
class Decline:
    """Why there is no run now.  kind: active | data | cooldown."""

    kind: str
    reason: str


def due(facts: Facts, schedule: ScheduleSettings, now: datetime) -> str | None:
    """Return ``volume`` or ``age`` when the setting asks for a run by now, whether or not one can begin."""
    if schedule.retrain_new_traces and facts.num_new_traces >= schedule.retrain_new_traces:
        return VOLUME
    if schedule.retrain_age_hours and facts.num_new_traces:
        longest = timedelta(hours=schedule.retrain_age_hours)
        if facts.learned_at is None or now - facts.learned_at >= longest:
            return AGE
    return None


def decline(
    trigger: str,
    facts: Facts,
    schedule: ScheduleSettings,
    learning: LearningSettings,
    now: datetime,
    force: bool = False,
) -> Decline | None:
    """Return why a run must wait, or None when it may begin.

    One runs at a time, whoever asks.  Too few traces stop everybody but those who force it.  New traces and a cool-down
    are asked of the automatic triggers alone.
    """
    if facts.active_run is not None:
        return Decline(ACTIVE, f"run {facts.active_run} is active; wait for it (adaptive-spec runs)")
    if force:
        return None
    if facts.num_traces < learning.min_traces:
        needed = f"{facts.num_traces} traces are stored and learning.min_traces is {learning.min_traces}"
        return Decline(DATA, f"{needed}; serve more requests, or force it")
    if trigger not in AUTOMATIC:
        return None
    if facts.num_new_traces < schedule.min_new_traces:
        came = f"{facts.num_new_traces} traces came since the last run"
        return Decline(DATA, f"{came} and schedule.min_new_traces is {schedule.min_new_traces}")
    span = timedelta(hours=schedule.cooldown_hours)
    # abs: a run that a clock which was ahead dated to the future must not hold all others until then.
    if facts.last_run_at is not None and abs(now - facts.last_run_at) < span:
        began = f"the last run began at {facts.last_run_at:%Y-%m-%d %H:%M} UTC"
        return Decline(COOLDOWN, f"{began} and schedule.cooldown_hours is {schedule.cooldown_hours:g}")
    return None
