"""When the service retrains and recalibrates by itself: APScheduler jobs in memory, one at a time each.

Every process that may lead has these timers; only those of the one that does are not paused.  The timers say when to
look, the records whether a job is due, so that it is begun once whoever looks.
"""

import logging
from collections.abc import Callable
from datetime import timedelta

from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.errors import AdaptiveSpecError
from adaptive_spec.settings import ScheduleSettings

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 60.0  # at most, between two looks whether a job is due


class Scheduler:
    """Interval jobs.  An interval of 0 hours leaves a job out; a job that is late runs once, not often.

    Args:
        claim: says whether a job with this interval is due, and counts it as begun if so.
        look: looks whether volume or age call for a run; left out where neither is set.
        roll_up, prune: keep the records small.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        *,
        claim: Callable[[str, timedelta], bool],
        retrain: Callable[[], None],
        calibrate: Callable[[], None],
        look: Callable[[], None],
        roll_up: Callable[[], None],
        prune: Callable[[], None],
    ) -> None:
        self._claim = claim
        self._scheduler = BackgroundScheduler(
            timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": 600}
        )
        for name, hours, job in (
            ("retrain", settings.retrain_hours, retrain),
            ("calibrate", settings.calibrate_hours, calibrate),
            ("roll_up", settings.rollup_seconds / 3600, roll_up),
            ("prune", settings.prune_hours, prune),
        ):
            if hours:
                every = timedelta(hours=hours)
                self._add(name, min(every.total_seconds() / 10, _LOOK_SECONDS), self._run_if_due, name, every, job)
        if settings.retrain_new_traces or settings.retrain_age_hours:
            self._add("look", settings.poll_seconds, self._guarded, "look", look)

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs that will run."""
        return sorted(job.id for job in self._scheduler.get_jobs())

    def start(self) -> None:
        """Start the timers, paused."""
        self._scheduler.start(paused=True)

    def resume(self) -> None:
        """Run jobs from now on: this process leads."""
        self._scheduler.resume()

    def pause(self) -> None:
        """Begin no more jobs: another process may lead."""
        self._scheduler.pause()

    def stop(self) -> None:
        """End the timers."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _add(self, name: str, seconds: float, job: Callable[..., None], *args: object) -> None:
        self._scheduler.add_job(job, "interval", args=args, seconds=seconds, id=name)

    def _run_if_due(self, name: str, every: timedelta, job: Callable[[], None]) -> None:
        def run() -> None:
            if self._claim(name, every):
                job()

        self._guarded(name, run)

    def _guarded(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except (AdaptiveSpecError, SQLAlchemyError) as error:
            logger.warning("scheduled %s: %s", name, error)
