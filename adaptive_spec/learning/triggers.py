"""When a training run makes sense.  Pure: facts and settings in, a decision out.

Triggers are ``schedule`` (an interval), ``volume`` (new traces), ``age`` (of what was learned last), ``drift``, and
whatever a person writes.  Called by the service, which records every "not now".

What a run may gain is read off the last ones: the upper end of the interval of what they gained on held-out requests,
per trace that was new to them, times the traces that are new now.  A high guess: more of the same traffic teaches less
and less, and only what even this calls too little is put off.  It knows nothing of a change in traffic; drift does.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from adaptive_spec.records.runs import RunGain
from adaptive_spec.settings import LearningSettings, ScheduleSettings

SCHEDULE, VOLUME, AGE, DRIFT = "schedule", "volume", "age", "drift"
AUTOMATIC = (SCHEDULE, VOLUME, AGE, DRIFT)
ACTIVE, DATA, COOLDOWN, GAIN, TRIAL = "active", "data", "cooldown", "gain", "trial"
GAIN_MEMORY = timedelta(days=30)  # what runs before it gained says nothing of today's traffic
_ASKED_FOR_GAIN = (SCHEDULE, VOLUME, AGE)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the records say.

    active_run: its number.  num_traces: to train on, held-out ones left out; num_new_traces: of them, those that came
    after the last run began that learned to its end.  learned_at: when that was.  last_run_at: when any run last began.
    gains: what the last runs gained that learned to their end.
    canary: the release that is on trial.
    """

    active_run: int | None
    num_traces: int
    num_new_traces: int
    learned_at: datetime | None
    last_run_at: datetime | None
    gains: tuple[RunGain, ...] = ()
    canary: int | None = None


@dataclass(frozen=True, slots=True)
class Decline:
    """Why there is no run now.  kind: active | data | cooldown | gain | trial."""

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


def expected_gain_share(facts: Facts) -> float | None:
    """Return the most that a run can be expected to gain now, as a share of the acceptance length.

    The better of the last runs speaks, so that one which went wrong decides nothing.  None when none has measured it.
    """
    per_trace = [max(run.gain_share_high, 0.0) / run.num_new_traces for run in facts.gains if run.num_new_traces]
    return max(per_trace) * facts.num_new_traces if per_trace else None


def decline(
    trigger: str,
    facts: Facts,
    schedule: ScheduleSettings,
    learning: LearningSettings,
    now: datetime,
    force: bool = False,
) -> Decline | None:
    """Return why a run must wait, or None when it may begin.

    One runs at a time, whoever asks, and none while a release is on trial: what it makes could not be tried.  Too few
    traces stop everybody but those who force it.  New traces and a cool-down are asked of the automatic triggers alone,
    and an expected gain of those but drift.
    """
    if facts.active_run is not None:
        return Decline(ACTIVE, f"run {facts.active_run} is active; wait for it (adaptive-spec runs)")
    if facts.canary is not None:
        return Decline(
            TRIAL, f"release {facts.canary} is on trial; wait for it, or end it (adaptive-spec releases canary)"
        )
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
    expected = expected_gain_share(facts) if trigger in _ASKED_FOR_GAIN else None
    if expected is not None and expected < schedule.min_expected_gain_share:
        promise = (
            f"{facts.num_new_traces} new traces promise {expected:.2%} of acceptance length at best, by the last runs"
        )
        return Decline(
            GAIN, f"{promise}, and schedule.min_expected_gain_share is {schedule.min_expected_gain_share:.2%}"
        )
    return None
