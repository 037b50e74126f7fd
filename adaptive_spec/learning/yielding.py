"""Training yields to serving: how much slower steps are while a run trains, and pauses that bound it.

A step is held against earlier ones of its shape, so that other chains or fuller batches are not taken for a slowdown.
Called by the pipeline while a training process runs; the decoder's thread tells of its steps.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from adaptive_spec.core import Step

_LONGEST_REST = 12.0  # windows
_MIN_STEPS = 10  # of a window; fewer say nothing, and a decoder with so little to do loses nothing
_MIN_SEEN = 5  # steps of a shape before they count as usual
_MEMORY = 200  # steps of a shape over which what is usual follows

_IDLE, _WORKING, _RESTING = "idle", "working", "resting"


@dataclass(frozen=True, slots=True)
class Pace:
    """What steps took, and what steps of their shapes usually take, in seconds."""

    num_steps: int = 0
    spent: float = 0.0
    usual: float = 0.0

    def plus(self, spent: float, usual: float) -> "Pace":
        return Pace(self.num_steps + 1, self.spent + spent, self.usual + usual)

    @property
    def slowdown_share(self) -> float:
        """The share of decoding speed that is lost; negative when steps are faster than usual."""
        return 1 - self.usual / self.spent if self.spent else 0.0


class PaceMeter:
    """Hears of every step.  Cheap: it runs on the decoder's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._usual: dict[tuple[int, int, str], tuple[float, int]] = {}  # mean seconds and steps seen, by shape
        self._phase = _IDLE
        self._window = self._run = Pace()

    def note(self, step: Step) -> None:
        """Count a step.  The first of a request is its prompt's, and says nothing."""
        if not step.step_index:
            return
        shape = (step.batch_size, step.chain_length, step.drafter)
        seconds = step.draft_seconds + step.verify_seconds
        with self._lock:
            mean, seen = self._usual.get(shape, (0.0, 0))
            if self._phase != _IDLE and seen >= _MIN_SEEN:
                self._run = self._run.plus(seconds, mean)
            if self._phase == _WORKING:
                self._window = self._window.plus(seconds, mean) if seen >= _MIN_SEEN else self._window
            else:
                self._usual[shape] = (mean + (seconds - mean) / min(seen + 1, _MEMORY), seen + 1)

    def begin(self) -> None:
        """A run trains from now on."""
        with self._lock:
            self._phase, self._window, self._run = _WORKING, Pace(), Pace()

    def rest(self, resting: bool) -> None:
        """It pauses, or goes on."""
        with self._lock:
            self._phase, self._window = (_RESTING if resting else _WORKING), Pace()

    def end(self) -> Pace:
        """It is over.  Returns the pace of the whole run, pauses included."""
        with self._lock:
            self._phase = _IDLE
            return self._run

    def take(self) -> Pace:
        """Return the pace since the last look, and begin a new one."""
        with self._lock:
            taken, self._window = self._window, Pace()
            return taken


@dataclass(frozen=True, slots=True)
class ServingReport:
    """What a run did to serving.  slowdown_share: of decoding speed, lost over the run; None: nothing was decoded."""

    slowdown_share: float | None
    num_steps: int
    num_pauses: int
    paused_seconds: float


def rest_seconds(worked_seconds: float, slowdown_share: float, bound: float) -> float:
    """Return how long to rest so that decoding loses no more than ``bound`` over work and rest together.

    Work of W seconds that costs a share s, and a rest of R that costs none, cost s W / (W + R).
    """
    if slowdown_share <= bound:
        return 0.0
    longest = _LONGEST_REST * worked_seconds
    return min(longest, worked_seconds * (slowdown_share / bound - 1)) if bound else longest


class Yielding:
    """Follows one training process at a time.

    Args:
        bound: largest share of decoding speed that a run may cost while there is something to decode.
        share_cores: told True when the process needs its share of the cores, False when the decoder gets all.
        window_seconds: of training between two looks.
    """

    def __init__(
        self,
        meter: PaceMeter,
        bound: float,
        share_cores: Callable[[bool], None] = lambda _: None,
        window_seconds: float = 5.0,
    ) -> None:
        self._meter, self._bound, self._share_cores, self._window = meter, bound, share_cores, window_seconds

    def follow(self, ended: Callable[[float], bool], pause: Callable[[bool], None]) -> ServingReport:
        """Pause and continue the process until it has ended.

        Args:
            ended: waits for the end, at most so many seconds, and says whether it came.
            pause: tells the process to pause, or to go on.
        """
        num_pauses, paused_seconds = 0, 0.0
        self._share_cores(True)
        self._meter.begin()
        try:
            while not ended(self._window):
                pace = self._meter.take()
                if pace.num_steps < _MIN_STEPS:
                    continue
                if rest := rest_seconds(self._window, pace.slowdown_share, self._bound):
                    began = time.monotonic()
                    self._rest(ended, pause, rest)
                    num_pauses, paused_seconds = num_pauses + 1, paused_seconds + time.monotonic() - began
        finally:
            whole = self._meter.end()
            self._share_cores(False)
        slowdown = whole.slowdown_share if whole.num_steps else None
        return ServingReport(slowdown, whole.num_steps, num_pauses, paused_seconds)

    def _rest(self, ended: Callable[[float], bool], pause: Callable[[bool], None], seconds: float) -> None:
        pause(True)
        self._share_cores(False)
        self._meter.rest(True)
        ended(seconds)
        self._meter.rest(False)
        self._share_cores(True)
        pause(False)
