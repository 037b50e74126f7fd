"""Timers run only while this process leads, and only what the records say is due."""

import threading
from datetime import timedelta

from adaptive_spec.errors import RunError
from adaptive_spec.scheduler import Scheduler
from adaptive_spec.settings import ScheduleSettings

NO_UPKEEP = {"rollup_seconds": 0, "prune_hours": 0}


class Jobs:
    """Counts what was run; ``due`` is what the records would say."""

    def __init__(self, settings: ScheduleSettings) -> None:
        self.due = True
        self.asked: list[tuple[str, timedelta]] = []
        self.ran = threading.Event()
        jobs = dict.fromkeys(("retrain", "calibrate", "look", "roll_up", "prune"), self.run)
        self.scheduler = Scheduler(settings.model_copy(update=NO_UPKEEP), claim=self.claim, **jobs)
        self.scheduler.start()

    def claim(self, name: str, every: timedelta) -> bool:
        self.asked.append((name, every))
        return self.due

    def run(self) -> None:
        self.ran.set()
        raise RunError("on purpose: the next one runs all the same")


HALF_SECOND = 0.5 / 3600


def test_jobs_run_while_this_process_leads() -> None:
    jobs = Jobs(ScheduleSettings(retrain_hours=HALF_SECOND, calibrate_hours=0))
    assert jobs.scheduler.jobs == ["retrain"]
    assert not jobs.ran.wait(0.3) and jobs.asked == []
    jobs.scheduler.resume()
    assert jobs.ran.wait(10)
    assert set(jobs.asked) == {("retrain", timedelta(hours=HALF_SECOND))}
    jobs.ran.clear()
    assert jobs.ran.wait(10)
    jobs.scheduler.pause()
    jobs.ran.wait(0.3)  # one that had begun
    jobs.ran.clear()
    assert not jobs.ran.wait(0.3)
    jobs.scheduler.stop()


def test_what_is_not_due_does_not_run() -> None:
    jobs = Jobs(ScheduleSettings(retrain_hours=0, calibrate_hours=HALF_SECOND))
    jobs.due = False
    jobs.scheduler.resume()
    assert not jobs.ran.wait(0.5)
    assert {name for name, _ in jobs.asked} == {"calibrate"}
    jobs.scheduler.stop()


def test_looking_for_triggers_needs_no_interval() -> None:
    jobs = Jobs(ScheduleSettings(retrain_hours=0, calibrate_hours=0, retrain_new_traces=1, poll_seconds=0.05))
    jobs.scheduler.resume()
    assert jobs.ran.wait(10)
    assert jobs.asked == []
    jobs.scheduler.stop()
