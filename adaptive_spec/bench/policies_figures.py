"""What turns of policies say: ratios of tokens a second, by domain and on the mix, with intervals.  Pure.

A turn's rate is that of its decoding, after the first token; the prefill is the same under every policy.  Two sides are
compared within the same turn, so that what the machine did meanwhile mostly cancels.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adaptive_spec.bench.compare import Cell
from adaptive_spec.errors import NotEnoughDataError

_BOOTSTRAPS = 2000

Rates = dict[str, dict[str, NDArray[np.float64]]]  # tokens a second by side and domain, [rounds, tasks] each


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast one side is as another, and the 95 % interval of that; None: of one turn there is none."""

    value: float
    low: float | None
    high: float | None

    @property
    def is_slower(self) -> bool:
        """Beyond what chance explains."""
        return self.high is not None and self.high < 1


def rates(cells: Iterable[Cell]) -> Rates:
    """Arrange what was measured; a task whose answers were over with their first token says nothing and is left out.

    Raises:
        NotEnoughDataError: no task of a domain is left.
    """
    shown: Rates = {}
    for cell in cells:
        per_turn = [turn.decode.tokens_per_second or np.nan for turn in cell.turns]
        by_round = np.asarray(per_turn, np.float64).reshape(-1, len(cell.workload.tasks))
        shown.setdefault(cell.side, {})[cell.workload.domain] = by_round
    for domain in next(iter(shown.values())):
        whole = np.all([~np.isnan(of[domain]).any(axis=0) for of in shown.values()], axis=0)
        if not whole.any():
            raise NotEnoughDataError(f"No answer in {domain} went beyond its first token. Raise --prompts.")
        for of in shown.values():
            of[domain] = of[domain][:, whole]
    return shown


def ratio(mine: NDArray[np.float64], theirs: NDArray[np.float64], seed: int = 0) -> Ratio:
    """The median of the ratios by turn.  mine, theirs: [rounds, tasks], of one domain.

    The interval draws tasks, then rounds of each; the same seed draws the same ones for every pair of sides.
    """
    point, drawn = _medians(mine / theirs, seed)
    return _with_interval(point, drawn, mine.size)


def mixed(mine: Mapping[str, NDArray[np.float64]], theirs: Mapping[str, NDArray[np.float64]], seed: int = 0) -> Ratio:
    """All domains together, the same number of tokens of each: the other side's seconds over one's own.

    Of each domain a token takes the other side its median seconds, and oneself so many divided by the domain's ratio.
    """
    their_seconds, my_seconds = np.zeros(1 + _BOOTSTRAPS), np.zeros(1 + _BOOTSTRAPS)
    for place, domain in enumerate(mine):
        seconds = np.append(*_medians(1 / theirs[domain], seed + place))
        their_seconds += seconds
        my_seconds += seconds / np.append(*_medians(mine[domain] / theirs[domain], seed + place))
    point, *drawn = their_seconds / my_seconds
    return _with_interval(float(point), np.asarray(drawn), min(rate.size for rate in mine.values()))


def best_on_mix(shown: Rates, sides: Sequence[str], against: str) -> str:
    """The side that turned out fastest on the mix: chosen in hindsight, so in its favour."""
    return max(sides, key=lambda side: mixed(shown[side], shown[against]).value)


def tokens_per_second(by_domain: Iterable[NDArray[np.float64]]) -> float:
    """Of domains with the same number of tokens each; of each the median."""
    seconds = [float(np.median(1 / rate)) for rate in by_domain]
    return len(seconds) / sum(seconds)


def _medians(values: NDArray[np.float64], seed: int) -> tuple[float, NDArray[np.float64]]:
    """Of all turns, and of turns drawn anew: [draws].  values: [rounds, tasks]"""
    random = np.random.default_rng(seed)
    num_rounds, num_tasks = values.shape
    task = random.integers(0, num_tasks, (_BOOTSTRAPS, 1, num_tasks))
    turn = random.integers(0, num_rounds, (_BOOTSTRAPS, num_rounds, num_tasks))
    return float(np.median(values)), np.asarray(np.median(values[turn, task], axis=(1, 2)))


def _with_interval(point: float, drawn: NDArray[np.float64], num_turns: int) -> Ratio:
    if num_turns < 2:
        return Ratio(point, None, None)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Ratio(point, float(low), float(high))
