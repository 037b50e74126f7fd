"""When the service retrains and recalibrates by itself: APScheduler jobs in memory, one at a time each."""

import logging
from collections.abc import Callable

from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.errors import AdaptiveSpecError
from adaptive_spec.settings import ScheduleSettings

logger = logging.getLogger(__name__)


class Scheduler:
    """Interval jobs.  An interval of 0 hours leaves a job out; a job that is late runs once, not often.

    Args:
        look: looks whether volume or age call for a run; left out where neither is set.
        roll_up, prune: keep the records small.
    """

    def __init__(
        self,
        settings: ScheduleSettings,
        *,
        retrain: Callable[[], None],
        calibrate: Callable[[], None],
        look: Callable[[], None],
        roll_up: Callable[[], None],
        prune: Callable[[], None],
    ) -> None:
        looks = settings.retrain_new_traces or settings.retrain_age_hours
        self._scheduler = BackgroundScheduler(
            timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": 600}
        )
        for name, hours, job in (
            ("retrain", settings.retrain_hours, retrain),
            ("calibrate", settings.calibrate_hours, calibrate),
            ("look", settings.poll_seconds / 3600 if looks else 0, look),
            ("roll_up", settings.rollup_seconds / 3600, roll_up),
            ("prune", settings.prune_hours, prune),
        ):
            if hours:
                self._scheduler.add_job(self._guarded, "interval", args=(name, job), hours=hours, id=name)

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs that will run."""
        return sorted(job.id for job in self._scheduler.get_jobs())

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _guarded(self, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except (AdaptiveSpecError, SQLAlchemyError) as error:
            logger.warning("scheduled %s: %s", name, error)
