"""The table of docs/decisions/0008-drift.md: ``python -m tests.calibration.measure_drift`` (river is optional)."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from adaptive_spec.calibration.drift import ShiftDetector, Unit
from tests.calibration.traffic import Outcome, steps

ALARM_STEPS, MIN_STEPS = 200_000, 1_000  # of one of a domain's two streams, under the default settings
BASELINE, AFTERWARDS, RUNS = 6_000, 9_000, 40
STATIONARY_RUNS, STATIONARY_STEPS = 20, 100_000

Update = Callable[[int, Outcome], bool]


class PerRequest:
    """Closes requests for a detector of their means; ``score`` says which number of a step is summed."""

    def __init__(self, add: Callable[[Unit], bool], residual: bool = False) -> None:
        self.add, self.residual = add, residual
        self.open: dict[int, list[float]] = {}

    def __call__(self, index: int, outcome: Outcome) -> bool:
        sums = self.open.setdefault(outcome.request, [0.0, 0, 0])
        sums[0] += outcome.residual if self.residual else outcome.accepted
        sums[1] += outcome.num_reached if self.residual else 1
        sums[2] += 1
        if not outcome.finished:
            return False
        total, weight, num_steps = self.open.pop(outcome.request)
        return self.add(Unit(total, int(weight), int(num_steps), index))


def contestants() -> dict[str, Callable[[], Update]]:
    """Makers of detectors, by name."""

    def ours(residual: bool) -> Update:
        detector = ShiftDetector(ALARM_STEPS, MIN_STEPS)
        return PerRequest(lambda unit: detector.add(unit) is not None, residual)

    found: dict[str, Callable[[], Update]] = {
        "rank bets, acceptance": lambda: ours(False),
        "rank bets, calibration": lambda: ours(True),
    }
    try:
        from river.drift import ADWIN
    except ImportError:
        return found

    def of_steps(delta: float) -> Update:
        detector: Any = ADWIN(delta=delta)

        def update(index: int, outcome: Outcome) -> bool:
            detector.update(float(outcome.accepted))
            return bool(detector.drift_detected)

        return update

    def of_requests(delta: float) -> Update:
        detector: Any = ADWIN(delta=delta, clock=1)

        def add(unit: Unit) -> bool:
            detector.update(unit.total / unit.weight)
            return bool(detector.drift_detected)

        return PerRequest(add)

    found["ADWIN of steps, delta 0.002"] = lambda: of_steps(0.002)
    found["ADWIN of steps, delta 1e-5"] = lambda: of_steps(1e-5)
    found["ADWIN of requests, delta 0.002"] = lambda: of_requests(0.002)
    found["ADWIN of requests, delta 0.05"] = lambda: of_requests(0.05)
    return found


def first_alarms(outcomes: Iterator[Outcome], updates: dict[str, Update]) -> dict[str, int | None]:
    """Return the delay of each contestant's first alarm after the change, None without one."""
    delays: dict[str, int | None] = dict.fromkeys(updates)
    for index, outcome in enumerate(outcomes):
        for name, update in updates.items():
            if update(index, outcome) and index >= BASELINE and delays[name] is None:
                delays[name] = index - BASELINE
    return delays


def describe(delays: list[int | None]) -> str:
    """Median and 90th percentile; a run without an alarm counts as endless."""
    ordered = sorted(AFTERWARDS if delay is None else delay for delay in delays)
    middle, late = int(np.median(ordered)), ordered[int(0.9 * len(ordered))]
    missed = sum(delay is None for delay in delays)
    return f"{middle} / {late if late < AFTERWARDS else 'none'}" + (f" ({missed} missed)" if missed else "")


def main() -> None:
    """Print a line per kind of traffic and contestant."""
    made = contestants()
    for spread in (0.0, 0.15):
        for after, error in ((0.45, 0.0), (0.5, 0.0), (0.75, 0.0), (None, 0.1), (None, -0.1)):
            delays: dict[str, list[int | None]] = {name: [] for name in made}
            for seed in range(RUNS):
                traffic = steps(
                    0.6,
                    BASELINE + AFTERWARDS,
                    after=after,
                    change_at=BASELINE,
                    error_after=error,
                    spread=spread,
                    seed=seed,
                )
                for name, delay in first_alarms(traffic, {name: make() for name, make in made.items()}).items():
                    delays[name].append(delay)
            what = f"acceptance .60 -> {after}" if after else f"confidence off by {-error:+}"
            for name, found in delays.items():
                if after or "calibration" in name:
                    print(f"spread {spread}  {what}  {name}: {describe(found)}", flush=True)
        counts = dict.fromkeys(made, 0)
        for seed in range(STATIONARY_RUNS):
            updates = {name: make() for name, make in made.items()}
            for index, outcome in enumerate(steps(0.6, STATIONARY_STEPS, spread=spread, seed=10_000 + seed)):
                for name, update in updates.items():
                    counts[name] += update(index, outcome)
        for name, count in counts.items():
            rate = count / (STATIONARY_RUNS * STATIONARY_STEPS) * 100_000
            print(f"spread {spread}  false alarms per 100,000 steps  {name}: {rate:.2f}", flush=True)


if __name__ == "__main__":
    main()
