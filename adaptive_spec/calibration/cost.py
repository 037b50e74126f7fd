"""What a decoder step costs on this machine, measured.

The engine hands in two timers; this room only decides how often to call them and what to believe.
"""

import math
import os
import platform
from collections.abc import Callable, Sequence

import numpy as np
from sklearn.isotonic import IsotonicRegression

from adaptive_spec.core import StepCost

_CLIP = 3.0  # samples further than this many median absolute deviations from the median are dropped


class CostModel:
    """The cost of a step by its number of rows.

    Products are shared by all tokens of a step, so what counts is how many tokens there are.

    Args:
        step: of one row, by chain length.
        draft: (rows, seconds of drafting one token for each), ascending.
        verify: (tokens, seconds of one target forward over them), ascending.
    """

    def __init__(
        self,
        step: StepCost,
        draft: Sequence[tuple[int, float]] = (),
        verify: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.step = step
        self._draft = [(1, step.draft_seconds), *draft]
        self._verify = [*enumerate(step.verify_seconds, start=1), *verify]
        self._by_rows: dict[int, StepCost] = {1: step}

    def at(self, rows: int) -> StepCost:
        """The cost of a step of so many rows; between what was measured, and beyond it, on straight lines."""
        if rows not in self._by_rows:
            lengths = range(len(self.step.verify_seconds))
            self._by_rows[rows] = StepCost(
                _on_lines(rows, self._draft),
                tuple(_on_lines(rows * (length + 1), self._verify) for length in lengths),
                self.step.key.replace("batch=1", f"batch={rows}"),
            )
        return self._by_rows[rows]


def _on_lines(at: int, points: Sequence[tuple[int, float]]) -> float:
    xs, ys = zip(*points, strict=True)
    if at <= xs[-1]:
        return float(np.interp(at, xs, ys))
    slope = max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])) if len(xs) > 1 else 0.0
    return float(ys[-1] + slope * (at - xs[-1]))


def cost_key(
    *, target: str, draft: str, dtype: str, device: str, threads: int, batch_size: int, hardware: str | None = None
) -> str:
    """Name what a measured cost is valid for.  ``hardware`` defaults to the processor's kind and number of cores."""
    hardware = hardware or f"{platform.machine()}-{os.cpu_count()}"
    return f"{hardware}|{device}|{target}|{draft}|{dtype}|threads={threads}|batch={batch_size}"


def measure_cost(
    time_draft: Callable[[int], float],
    time_verify: Callable[[int], float],
    max_chain_length: int,
    key: str,
    rows: int = 1,
    repeats: int = 5,
) -> CostModel:
    """Measure drafting and verifying, for chains of 0 … ``max_chain_length`` and batches of 1 … ``rows``.

    Each is timed ``repeats`` times after one warm-up; all take turns, so that a machine that slows down slows all of
    them.  Outliers are dropped, medians taken, and verification made non-decreasing in tokens (isotonic fit), because
    noise that makes a longer chain look cheaper would be exploited by the policies.

    Args:
        time_draft: runs the draft for one token in each of so many rows; returns seconds.
        time_verify: runs the target over a number of tokens; returns seconds.

    Raises:
        ValueError: ``repeats`` is not positive, or a timer returned something that is no positive time.
    """
    if repeats < 1:
        raise ValueError("repeats must be at least 1")
    batches = _doubling(1, rows)
    single = max_chain_length + 1
    tokens = [*range(1, single), *_doubling(single, rows * single)]
    rounds = [
        [*(time_draft(count) for count in batches), *(time_verify(count) for count in tokens)]
        for _ in range(repeats + 1)
    ][1:]
    seconds = [_typical(list(samples)) for samples in zip(*rounds, strict=True)]
    draft, verify = seconds[: len(batches)], np.asarray(seconds[len(batches) :])
    monotone = [float(value) for value in IsotonicRegression().fit_transform(np.arange(len(verify)), verify)]
    step = StepCost(draft[0], tuple(monotone[:single]), key)
    more_draft = list(zip(batches, draft, strict=True))[1:]
    more_verify = list(zip(tokens, monotone, strict=True))[single:]
    return CostModel(step, more_draft, more_verify)


def _doubling(first: int, last: int) -> list[int]:
    counts = [first]
    while counts[-1] * 2 <= last:
        counts.append(counts[-1] * 2)
    return counts


def _typical(samples: list[float]) -> float:
    """Return the median of the samples that are near the median."""
    if not all(math.isfinite(sample) and sample > 0 for sample in samples):
        raise ValueError(f"a timer returned {samples}; every time must be positive and finite")
    values = np.asarray(samples)
    distance = np.abs(values - np.median(values))
    return float(np.median(values[distance <= _CLIP * np.median(distance)]))
