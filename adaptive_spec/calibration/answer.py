"""What a drift sets going: nothing, a calibration or a training run, under a cool-down, and an event that says which.

The service passes in how to calibrate and retrain, and calls ``answer`` with what ``calibration.watch`` found.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta

from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.calibration.drift import UP
from adaptive_spec.calibration.watch import ACCEPTANCE, CALIBRATION, Drift
from adaptive_spec.errors import AdaptiveSpecError
from adaptive_spec.records.database import Database
from adaptive_spec.records.drifts import DRIFT_ANSWER
from adaptive_spec.records.events import add_event, list_events
from adaptive_spec.settings import DriftSettings

logger = logging.getLogger(__name__)

NOTHING, CALIBRATE, RETRAIN = "nothing", "calibrate", "retrain"


class DriftAnswers:
    """Answers one drift at a time.

    Args:
        calibrate: refits a domain to the steps after an id and says what came of it.
        retrain: starts a run and says which.
    """

    def __init__(
        self,
        database: Database,
        settings: DriftSettings,
        *,
        calibrate: Callable[[str, int], str],
        retrain: Callable[[], str],
    ) -> None:
        self._database = database
        self._settings = settings
        self._calibrate = calibrate
        self._retrain = retrain
        self._waiting: deque[Drift] = deque()

    def answer(self, drifts: Iterable[Drift]) -> None:
        """Act on the drifts and on those that an outage has left.

        Raises:
            SQLAlchemyError: the database is away; call again.
        """
        self._waiting.extend(drifts)
        while self._waiting:
            drift = self._waiting.popleft()
            try:
                self._answer(drift)
            except SQLAlchemyError:
                self._waiting.appendleft(drift)
                raise

    def _answer(self, drift: Drift) -> None:
        if self._settings.triggers == "events":
            return
        action, reason = wanted(drift, self._settings.triggers)
        if action != NOTHING and (wait := self._cooling(action, drift.source.domain)):
            started, reason = False, f"not now, because {wait}"
        elif action != NOTHING:
            started, reason = self._start(action, drift)
        else:
            started = False
        logger.warning("drift of %s in %s: %s: %s", drift.stream, drift.source.domain, action, reason)
        detail = {
            "action": action,
            "started": started,
            "reason": reason,
            "stream": drift.stream,
            "direction": drift.shift.direction,
        }
        add_event(self._database, DRIFT_ANSWER, detail, drift.source.domain, drift.release)

    def _start(self, action: str, drift: Drift) -> tuple[bool, str]:
        try:
            if action == RETRAIN:
                return True, self._retrain()
            return True, self._calibrate(drift.source.domain, drift.shift.first_step)
        except AdaptiveSpecError as error:
            return False, f"not now, because {error}"

    def _cooling(self, action: str, domain: str) -> str:
        """Say when the last such action was, if that is too lately: a run is everybody's, a calibration a domain's."""
        span = timedelta(hours=self._settings.cooldown_hours)
        for event in list_events(self._database, 1_000, DRIFT_ANSWER):
            same = event.detail["action"] == action and (action == RETRAIN or event.domain == domain)
            lately = abs(datetime.now(UTC) - event.at) < span  # abs: the clock may have been ahead at that time
            if same and event.detail["started"] and lately:
                hours = self._settings.cooldown_hours
                return f"a drift did the same at {event.at:%Y-%m-%d %H:%M} UTC and drift.cooldown_hours is {hours:g}"
        return ""


def wanted(drift: Drift, triggers: str) -> tuple[str, str]:
    """Return the action that fits a drift, and why when it is none.  ``triggers``: calibrate | retrain."""
    if drift.source.drafter != "model":
        return NOTHING, "a release does not change what n-grams propose"
    if drift.stream == ACCEPTANCE and drift.shift.direction == UP:
        return NOTHING, "more acceptance than usual is no stale draft; look whether outputs repeat themselves"
    return (CALIBRATE if drift.stream == CALIBRATION else triggers), ""
