"""A test of bounded differences that one may look at after every request.  Pure: numbers in, bounds out.

By betting (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting", section 4): who
claims that the mean is at most m bets on it, and with a stake λ the capital

    K_n(m) = Π_i (1 + λ (d_i - m))

is a nonnegative supermartingale as long as each d_i has a mean of at most m given those before.  By Ville's inequality
it ever reaches 1 / level with a probability of at most ``level``, however often one looks and whenever one stops.
Stakes are fixed beforehand and the capitals of all of them averaged (their "diversified Kelly" bets), so that the order
of the differences does not matter: whoever reads the same records finds the same bounds.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

_STAKES = np.geomspace(0.005, 0.95, 16)  # shares of the largest stake that no difference can ruin
_LEAST_MEAN = -1 + 1e-6


def paired(requests: Iterable[tuple[bool, float]], others: Iterable[float] | None = None) -> list[float]:
    """Return differences in [-1, 1] between one side of a comparison and the other, in time.

    A block lasts until both sides have a request in it, and gives one difference: the mean of the first side less the
    mean of the other.  What changes with the hour changes both.

    Args:
        requests: in the order of their ends, whether one is of the first side, and its value in [0, 1].
        others: the values that count while a request is of the other side; None: the same.
    """
    found: list[float] = []
    sides: dict[bool, list[float]] = {True: [], False: []}
    told = list(requests)
    for (first, value), other in zip(told, others if others is not None else (v for _, v in told), strict=True):
        sides[first].append(value if first else other)
        if sides[True] and sides[False]:
            found.append(_mean(sides[True]) - _mean(sides[False]))
            sides = {True: [], False: []}
    return found


def log_capital(differences: Sequence[float] | NDArray[np.float64], mean: float) -> float:
    """Return the log of what betting against "the mean is at most this" has made of 1.

    Args:
        differences: [pairs], each in [-1, 1].
    """
    gains = (1 + np.asarray(differences, dtype=np.float64)) / (1 + mean)
    capitals = np.log1p(_STAKES[:, None] * (gains - 1)).sum(axis=1)  # the largest stake is 1 / (1 + mean)
    highest = float(capitals.max())
    return highest + math.log(float(np.exp(capitals - highest).mean()))


def lower_bound(differences: Sequence[float], level: float) -> float:
    """Return a bound that the mean is below with a probability of at most ``level``, at any of all looks."""
    values = np.asarray(differences, dtype=np.float64)
    if not len(values):
        return -1.0

    def excess(mean: float) -> float:
        """Falls with the mean; below 0 that mean is not ruled out."""
        return log_capital(values, mean) + math.log(level)

    return float(brentq(excess, _LEAST_MEAN, 1.0, xtol=1e-9)) if excess(_LEAST_MEAN) > 0 else -1.0


def upper_bound(differences: Sequence[float], level: float) -> float:
    """Return a bound that the mean is above with a probability of at most ``level``, at any of all looks."""
    return -lower_bound([-difference for difference in differences], level)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
