"""Change detection on the scores of finished requests.  ``calibration.watch`` feeds it; it knows no database.

The unit is a request, not a step.  Outcomes within a chain hang together, and so do the chains of a request, because
some requests are easier than others; a test that takes them for independent alarms on every run of easy ones.  Requests
are exchangeable as long as traffic and draft stay what they are.

The rank of a request's score among those before it is then uniform, whatever the scores' distribution, and independent
of earlier ranks (conformal test martingales: Vovk et al., "Algorithmic Learning in a Random World", 2nd ed., ch. 8).
Its normal score pays off bets on a shift up or down, and the bets add up as a Shiryaev-Roberts sum, whose expectation
grows by one a request.  An alarm at a sum of A therefore comes once in A requests at most on average, on traffic that
does not change (e-detectors: Shin, Ramdas, Rinaldo, arXiv 2203.03532, theorem 2.4).
"""

import math
import random
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

DOWN, UP = "down", "up"
_BETS = (0.5, 1.0, 2.0)  # shifts in standard deviations of a request's score
_PRIOR_WEIGHT = 16  # of the usual mean in a request's score, so that short requests speak more softly than long ones
_MAX_UNITS = 2_000  # requests that a new one is compared with
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Unit:
    """What one request showed: the mean total / weight.

    num_steps: of the request, as counted by this stream; last_step: id of the last of them.
    """

    total: float
    weight: int
    num_steps: int
    last_step: int

    def score(self, usual: float) -> float:
        """How far the request lies from the usual mean, drawn towards it the more the less it showed."""
        return (self.total - self.weight * usual) / (self.weight + _PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class Shift:
    """A change of the mean.

    before, after: means of the stream before and after the most likely place of the change.
    num_steps: since then.  first_step, last_step: ids of a step before the change and of the one that gave the alarm.
    """

    direction: str  # down | up
    before: float
    after: float
    num_steps: int
    first_step: int
    last_step: int


class ShiftDetector:
    """Watches the mean of one stream and starts anew after each alarm.

    Args:
        alarm_steps: steps per false alarm, at least, on average.
        min_steps: seen before any alarm; they are only compared with.
        seed: of the ranks of equal scores.
    """

    def __init__(self, alarm_steps: int, min_steps: int, seed: int = 0) -> None:
        self._alarm_steps = alarm_steps
        self._min_steps = min_steps
        self._random = random.Random(seed)
        self._restart()

    @property
    def num_steps(self) -> int:
        """Steps seen since the start or the last alarm."""
        return self._num_steps

    @property
    def mean(self) -> float:
        """Mean over the requests kept; 0 before the first."""
        return _mean(list(self._units))

    def add(self, unit: Unit) -> Shift | None:
        """Take in a finished request; return the shift when it gives the alarm."""
        if self._usual is None:
            self._warm_up(unit)
            return None
        score = unit.score(self._usual)
        place = self._normal_score(score)
        self._keep(unit, score)
        up, down = self._bet(self._up, place), self._bet(self._down, -place)
        mean_steps = self._num_steps / self._num_units
        if (up + down) / (2 * len(_BETS)) * mean_steps < self._alarm_steps:
            return None
        shift = _shift(list(self._units), self._usual, UP if up > down else DOWN)
        self._restart()
        return shift

    def _restart(self) -> None:
        self._units: deque[Unit] = deque()
        self._sorted: list[float] = []  # scores of the units
        self._usual: float | None = None  # mean of the first steps, once there are enough
        self._num_steps = 0
        self._num_units = 0
        self._up = [0.0] * len(_BETS)
        self._down = [0.0] * len(_BETS)

    def _warm_up(self, unit: Unit) -> None:
        self._count(unit)
        if self._num_steps >= self._min_steps:
            self._usual = self.mean
            self._sorted = sorted(unit.score(self._usual) for unit in self._units)

    def _normal_score(self, score: float) -> float:
        """The score's rank among those kept, as a standard normal number; ties are broken at random."""
        below = bisect_left(self._sorted, score)
        equal = bisect_right(self._sorted, score) - below
        rank = (below + (equal + 1) * self._random.uniform(1e-6, 1 - 1e-6)) / (len(self._sorted) + 1)
        return _NORMAL.inv_cdf(rank)

    def _keep(self, unit: Unit, score: float) -> None:
        if len(self._units) >= _MAX_UNITS and self._usual is not None:
            del self._sorted[bisect_left(self._sorted, self._units.popleft().score(self._usual))]
        insort(self._sorted, score)
        self._count(unit)

    def _count(self, unit: Unit) -> None:
        self._units.append(unit)
        self._num_steps += unit.num_steps
        self._num_units += 1

    def _bet(self, sums: list[float], place: float) -> float:
        for index, shift in enumerate(_BETS):
            sums[index] = (1 + sums[index]) * math.exp(shift * place - shift * shift / 2)
        return sum(sums)


def _shift(units: list[Unit], usual: float, direction: str) -> Shift:
    """Split the requests where the means of the two parts differ most for their sizes."""
    scores = np.asarray([unit.score(usual) for unit in units])
    sizes = np.arange(1, len(scores))
    sums = np.cumsum(scores)[:-1]
    gap = (scores.sum() - sums) / (len(scores) - sizes) - sums / sizes
    evidence = gap * np.sqrt(sizes * (len(scores) - sizes)) * (1 if direction == UP else -1)
    split = int(np.argmax(evidence)) + 1
    return Shift(
        direction=direction,
        before=_mean(units[:split]),
        after=_mean(units[split:]),
        num_steps=sum(unit.num_steps for unit in units[split:]),
        first_step=units[split - 1].last_step,
        last_step=units[-1].last_step,
    )


def _mean(units: list[Unit]) -> float:
    return sum(unit.total for unit in units) / max(1, sum(unit.weight for unit in units))
