"""What a decoder step costs on this machine, measured.

The engine hands in two timers; this room only decides how often to call them and what to believe.
"""

import math
import os
import platform
from collections.abc import Callable

import numpy as np
from sklearn.isotonic import IsotonicRegression

from adaptive_spec.core import StepCost

_CLIP = 3.0  # samples further than this many median absolute deviations from the median are dropped


def cost_key(
    *, target: str, draft: str, dtype: str, device: str, threads: int, batch_size: int, hardware: str | None = None
) -> str:
    """Name what a measured cost is valid for.  ``hardware`` defaults to the processor's kind and number of cores."""
    hardware = hardware or f"{platform.machine()}-{os.cpu_count()}"
    return f"{hardware}|{device}|{target}|{draft}|{dtype}|threads={threads}|batch={batch_size}"


def measure_cost(
    time_draft: Callable[[], float],
    time_verify: Callable[[int], float],
    max_chain_length: int,
    key: str,
    repeats: int = 5,
) -> StepCost:
    """Measure one drafted token, and one verification per chain length from 0 to ``max_chain_length``.

    Each is timed ``repeats`` times after one warm-up; all lengths take turns, so that a machine that slows down slows
    all of them.  Outliers are dropped, medians taken, and verification made non-decreasing in length (isotonic fit),
    because noise that makes a longer chain look cheaper would be exploited by the thresholds.

    Args:
        time_draft: runs the draft for one token; returns seconds.
        time_verify: runs the target over a chain of that length, that is length + 1 tokens; returns seconds.

    Raises:
        ValueError: ``repeats`` is not positive, or a timer returned something that is no positive time.
    """
    if repeats < 1:
        raise ValueError("repeats must be at least 1")
    lengths = range(max_chain_length + 1)
    rounds = [[time_draft(), *(time_verify(length) for length in lengths)] for _ in range(repeats + 1)][1:]
    draft_seconds, *verify_seconds = (_typical(list(samples)) for samples in zip(*rounds, strict=True))
    monotone = IsotonicRegression().fit_transform(np.arange(len(verify_seconds)), np.asarray(verify_seconds))
    return StepCost(draft_seconds, tuple(float(seconds) for seconds in monotone), key)


def _typical(samples: list[float]) -> float:
    """Return the median of the samples that are near the median."""
    if not all(math.isfinite(sample) and sample > 0 for sample in samples):
        raise ValueError(f"a timer returned {samples}; every time must be positive and finite")
    values = np.asarray(samples)
    distance = np.abs(values - np.median(values))
    return float(np.median(values[distance <= _CLIP * np.median(distance)]))
