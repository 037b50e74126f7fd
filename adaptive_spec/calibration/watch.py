"""Drift per domain, drafter and verifier: recorded steps in, events out.  The service calls ``poll`` now and then.

Two streams each.  *acceptance*: whether the first drafted token of a step was accepted.  Later positions are left out:
whether they are reached hangs on the first, and on how far the length policy lets chains run, which changes without the
draft growing stale.  *calibration*: accepted minus calibrated confidence over all reached positions; the policy looks
at nothing but confidences, so it cannot bias that.

Runs on the caller's thread, never on the decoder's.  Whatever the database refuses is tried again at the next poll:
the cursor moves only after a read, a drift is forgotten only after its event is stored.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from adaptive_spec.calibration.drift import Shift, ShiftDetector, Unit
from adaptive_spec.calibration.temperature import calibrated_confidences
from adaptive_spec.core import Release
from adaptive_spec.records.database import Database
from adaptive_spec.records.drifts import DRIFT, Outcome, finished_requests, outcomes_after, step_before_newest
from adaptive_spec.records.events import add_event, list_events
from adaptive_spec.settings import DriftSettings

ACCEPTANCE, CALIBRATION = "acceptance", "calibration"
STREAMS = (ACCEPTANCE, CALIBRATION)
_BATCH_STEPS = 2_000
_RESUMED_STEPS = 100_000  # of the live release that a start reads again
_MAX_OPEN = 4_096  # requests whose end is awaited; one whose end was never recorded gives way


class Source(NamedTuple):
    """Whose outcomes are compared with one another: acceptance means something else under another verifier."""

    domain: str
    drafter: str
    verifier: str


@dataclass(frozen=True, slots=True)
class Drift:
    """A shift of one stream of one source under one release."""

    source: Source
    stream: str  # acceptance | calibration
    release: int
    shift: Shift

    def detail(self) -> dict[str, Any]:
        """Return what the event says, the domain and the release aside."""
        return {
            "stream": self.stream,
            "drafter": self.source.drafter,
            "verifier": self.source.verifier,
            **asdict(self.shift),
        }


@dataclass(frozen=True, slots=True)
class StreamState:
    """Where one stream stands.  mean, num_steps: since the release went live or the stream's last drift."""

    domain: str
    drafter: str
    verifier: str
    stream: str
    release: int
    mean: float
    num_steps: int


@dataclass(slots=True)
class _Sums:
    """A running request as one source saw it."""

    num_steps: int = 0
    num_first_accepted: int = 0
    num_reached: int = 0
    residual: float = 0.0
    last_step: int = 0

    def units(self) -> dict[str, Unit]:
        return {
            ACCEPTANCE: Unit(self.num_first_accepted, self.num_steps, self.num_steps, self.last_step),
            CALIBRATION: Unit(self.residual, self.num_reached, self.num_steps, self.last_step),
        }


class DriftWatch:
    """Follows the records of the live release.  One thread polls; any may read ``states``."""

    def __init__(self, database: Database, settings: DriftSettings) -> None:
        self.states: tuple[StreamState, ...] = ()
        self.caught_up = False
        self._database = database
        self._settings = settings
        self._release: Release | None = None
        self._unstored: list[Drift] = []
        self._stored: list[Drift] = []

    def poll(self, release: Release) -> list[Drift]:
        """Read on, store an event for each new drift and return those stored; ``caught_up`` says if more waits.

        Raises:
            SQLAlchemyError: the database is away; nothing is lost, call again.
        """
        self._store()
        self.read(release)
        self._store()
        stored, self._stored = self._stored, []
        return stored

    def read(self, release: Release) -> None:
        """Read a batch of steps, from the beginning when the release is another one, and store nothing."""
        if self._release is None or self._release.version != release.version:
            self._restart(release)
        finished = finished_requests(self._database, self._open)  # before the steps: theirs are all there by then
        outcomes = outcomes_after(self._database, release.version, self._cursor, _BATCH_STEPS)
        for outcome in outcomes:
            self._take(outcome, release)
        self.caught_up = len(outcomes) < _BATCH_STEPS
        if not self.caught_up:  # a finished request may have steps in the next batch
            finished -= {outcome.request_id for outcome in outcomes}
        self._close(finished)
        self.states = tuple(self._state(source, stream) for source, stream in sorted(self._detectors))

    def _restart(self, release: Release) -> None:
        told = [event for event in list_events(self._database, 10_000, DRIFT) if event.release == release.version]
        cursor = step_before_newest(self._database, release.version, _RESUMED_STEPS)
        self._told: dict[tuple[Source, str], int] = {}  # last step of the newest drift known
        for event in reversed(told):
            source = Source(event.domain or "", event.detail["drafter"], event.detail["verifier"])
            self._told[source, event.detail["stream"]] = event.detail["last_step"]
        self._cursor = cursor
        self._open: dict[str, dict[Source, _Sums]] = {}
        self._detectors: dict[tuple[Source, str], ShiftDetector] = {}
        self._release = release

    def _take(self, outcome: Outcome, release: Release) -> None:
        source = Source(outcome.domain, outcome.drafter, outcome.verifier)
        sums = self._open.setdefault(outcome.request_id, {}).setdefault(source, _Sums())
        confidences = np.asarray(outcome.confidences, np.float64)
        if outcome.drafter == "model":
            scaling = release.for_domain(outcome.domain).scaling
            confidences = calibrated_confidences(confidences, scaling, outcome.request_temperature)
        sums.num_steps += 1
        sums.num_first_accepted += outcome.num_accepted > 0
        sums.num_reached += outcome.num_reached
        sums.residual += outcome.num_accepted - float(confidences.sum())
        sums.last_step = self._cursor = outcome.step_id
        if len(self._open) > _MAX_OPEN:
            self._open.pop(next(iter(self._open)))

    def _close(self, finished: set[str]) -> None:
        """Hand the finished requests to the detectors in the order of their ends."""
        ended = [item for name in finished for item in self._open.pop(name, {}).items()]
        for source, sums in sorted(ended, key=lambda item: item[1].last_step):
            for stream, unit in sums.units().items():
                if shift := self._detector(source, stream).add(unit):
                    self._tell(Drift(source, stream, self._version, shift))

    def _tell(self, drift: Drift) -> None:
        key = drift.source, drift.stream
        if drift.shift.last_step > self._told.get(key, 0):  # else an earlier life has told it
            self._told[key] = drift.shift.last_step
            self._unstored.append(drift)

    def _store(self) -> None:
        while self._unstored:
            drift = self._unstored[0]
            add_event(self._database, DRIFT, drift.detail(), drift.source.domain, drift.release)
            self._stored.append(self._unstored.pop(0))

    def _detector(self, source: Source, stream: str) -> ShiftDetector:
        if (source, stream) not in self._detectors:
            alarm_steps = self._settings.false_alarm_steps * len(STREAMS)  # the streams share the rate
            self._detectors[source, stream] = ShiftDetector(alarm_steps, self._settings.min_steps)
        return self._detectors[source, stream]

    @property
    def _version(self) -> int:
        return self._release.version if self._release else 0

    def _state(self, source: Source, stream: str) -> StreamState:
        detector = self._detectors[source, stream]
        return StreamState(*source, stream, self._version, detector.mean, detector.num_steps)


def replay(database: Database, settings: DriftSettings, release: Release) -> tuple[StreamState, ...]:
    """Return the states that a service would have now, read from its records alone."""
    watch = DriftWatch(database, settings)
    while not watch.caught_up:
        watch.read(release)
    watch.read(release)  # what was open when the last steps were read
    return watch.states
