"""Planted traffic: requests of differing difficulty, several at once, whose acceptance changes at a known step."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from adaptive_spec.calibration.drift import Shift, ShiftDetector, Unit

SLOTS = 8
MEAN_STEPS = 30  # of a request


@dataclass(frozen=True, slots=True)
class Outcome:
    """One step.  finished: it is its request's last.  residual: summed accepted - confidence over reached positions."""

    request: int
    accepted: bool
    num_reached: int
    residual: float
    finished: bool


def steps(
    acceptance: float,
    num_steps: int,
    *,
    after: float | None = None,
    change_at: int = 0,
    error_after: float = 0.0,
    spread: float = 0.0,
    seed: int = 0,
) -> Iterator[Outcome]:
    """Yield the steps of a decoder with ``SLOTS`` slots; a request's length is geometric.

    Args:
        after, change_at: the mean acceptance from step ``change_at`` on, also for requests that run already.
        error_after: what confidence is too low by, from then on.
        spread: standard deviation of difficulty, beta-distributed; all positions of a request's chains share it.
    """
    random = np.random.default_rng(seed)
    quantiles = np.zeros(SLOTS)
    requests = np.arange(SLOTS)
    tables = {mean: _difficulties(mean, spread) for mean in {acceptance, acceptance if after is None else after}}
    quantiles[:] = random.random(SLOTS)
    ends = random.random(num_steps) < 1 / MEAN_STEPS
    draws = random.random((num_steps, 3))
    fresh = random.random(num_steps)
    next_request = SLOTS
    for index in range(num_steps):
        slot = index % SLOTS
        changed = after is not None and index >= change_at
        table = tables[after if changed and after is not None else acceptance]
        chance = float(table[int(quantiles[slot] * len(table))])
        kept = 0
        while kept < 3 and draws[index, kept] < chance:
            kept += 1
        reached = min(kept + 1, 3)
        confidence = chance - (error_after if index >= change_at else 0.0)
        yield Outcome(int(requests[slot]), kept > 0, reached, kept - reached * confidence, bool(ends[index]))
        if ends[index]:
            requests[slot], next_request = next_request, next_request + 1
            quantiles[slot] = fresh[index]


def alarms(outcomes: Iterator[Outcome], stream: str, alarm_steps: int, min_steps: int) -> list[tuple[int, Shift]]:
    """Feed a detector as the watch does; return (step, shift) of each alarm."""
    detector = ShiftDetector(alarm_steps, min_steps)
    open_requests: dict[int, list[float]] = {}
    found = []
    for index, outcome in enumerate(outcomes):
        sums = open_requests.setdefault(outcome.request, [0.0, 0, 0])
        sums[0] += outcome.accepted if stream == "acceptance" else outcome.residual
        sums[1] += 1 if stream == "acceptance" else outcome.num_reached
        sums[2] += 1
        if outcome.finished:
            total, weight, num_steps = open_requests.pop(outcome.request)
            if shift := detector.add(Unit(total, int(weight), int(num_steps), index)):
                found.append((index, shift))
    return found


def _difficulties(mean: float, spread: float, size: int = 512) -> np.ndarray:
    """Quantiles of the beta distribution of that mean and standard deviation."""
    if not spread:
        return np.full(size, mean)
    from scipy.stats import beta

    total = mean * (1 - mean) / spread**2 - 1
    return np.asarray(beta.ppf((np.arange(size) + 0.5) / size, mean * total, (1 - mean) * total))
