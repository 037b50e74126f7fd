"""What a decoder step costs on this machine, measured.

The engine hands in two timers; this room only decides how often to call them and what to believe.
"""

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from sklearn.isotonic import IsotonicRegression

from adaptive_spec.core import StepCost

_SOME_LENGTHS = (0, 1, 3)  # of chains, timed in batches
_CLIP = 3.0  # samples further than this many median absolute deviations from the median are dropped


class CostModel:
    """The cost of a step by its number of rows.

    Args:
        measured: the cost of a step of so many rows; 1 is there at least.
    """

    def __init__(self, measured: Mapping[int, StepCost]) -> None:
        self._measured = dict(sorted(measured.items()))
        self._found = dict(self._measured)

    @property
    def step(self) -> StepCost:
        """Of one row."""
        return self._measured[1]

    def at(self, rows: int) -> StepCost:
        """The cost of a step of so many rows; between what was measured on straight lines, beyond it as the last."""
        if rows not in self._found:
            batches = list(self._measured)
            costs = list(self._measured.values())

            def on_lines(values: Sequence[float]) -> float:
                return float(np.interp(rows, batches, values))

            self._found[rows] = StepCost(
                on_lines([cost.draft_seconds for cost in costs]),
                tuple(on_lines(seconds) for seconds in zip(*(c.verify_seconds for c in costs), strict=True)),
                _keyed(self.step.key, rows),
            )
        return self._found[rows]


def _keyed(key: str, rows: int) -> str:
    return key.replace("batch=1", f"batch={rows}")


def cost_key(
    *, target: str, draft: str, dtype: str, device: str, threads: int, batch_size: int, hardware: str | None = None
) -> str:
    """Name what a measured cost is valid for.  ``hardware`` defaults to the processor's kind and number of cores."""
    hardware = hardware or f"{platform.machine()}-{os.cpu_count()}"
    return f"{hardware}|{device}|{target}|{draft}|{dtype}|threads={threads}|batch={batch_size}"


def measure_cost(
    time_draft: Callable[[int], float],
    time_verify: Callable[[int, int], float],
    max_chain_length: int,
    key: str,
    rows: int = 1,
    repeats: int = 5,
) -> CostModel:
    """Measure drafting and verifying, for chains of 0 … ``max_chain_length`` and batches of 1, 2, 4 … ``rows``.

    Each is timed ``repeats`` times after one warm-up; all take turns, so that a machine that slows down slows all of
    them.  Outliers are dropped, medians taken, and verification made non-decreasing in length (isotonic fit), because
    noise that makes a longer chain look cheaper would be exploited by the policies.  Of batches only some lengths are
    timed, the others are put on straight lines between.

    Args:
        time_draft: runs the draft for one token in each of so many rows; returns seconds.
        time_verify: runs the target over so many rows with chains of that length; returns seconds.

    Raises:
        ValueError: ``repeats`` is not positive, or a timer returned something that is no positive time.
    """
    if repeats < 1:
        raise ValueError("repeats must be at least 1")
    every = range(max_chain_length + 1)
    some = sorted({length for length in (*_SOME_LENGTHS, max_chain_length) if length <= max_chain_length})
    lengths = {batch: list(every) if batch == 1 else some for batch in _doubling(rows)}
    rounds = [
        {batch: [time_draft(batch), *(time_verify(batch, length) for length in lengths[batch])] for batch in lengths}
        for _ in range(repeats + 1)
    ][1:]
    measured = {}
    for batch, timed in lengths.items():
        draft, *verify = (_typical(list(samples)) for samples in zip(*(round[batch] for round in rounds), strict=True))
        monotone = IsotonicRegression().fit_transform(np.arange(len(verify)), np.asarray(verify))
        seconds = tuple(float(value) for value in np.interp(every, timed, monotone))
        measured[batch] = StepCost(draft, seconds, _keyed(key, batch))
    return CostModel(measured)


def _doubling(last: int) -> list[int]:
    """1, 2, 4 … and the last itself."""
    counts = [1]
    while counts[-1] * 2 < last:
        counts.append(counts[-1] * 2)
    return sorted({*counts, last})


def _typical(samples: list[float]) -> float:
    """Return the median of the samples that are near the median."""
    if not all(math.isfinite(sample) and sample > 0 for sample in samples):
        raise ValueError(f"a timer returned {samples}; every time must be positive and finite")
    values = np.asarray(samples)
    distance = np.abs(values - np.median(values))
    return float(np.median(values[distance <= _CLIP * np.median(distance)]))
