"""Planted shifts are found within the stated steps; stationary traffic gives no more alarms than the setting says."""

import math

import numpy as np
import pytest

from adaptive_spec.calibration import drift
from adaptive_spec.calibration.drift import ShiftDetector, Unit
from adaptive_spec.settings import DriftSettings
from tests.calibration.traffic import alarms, steps

SETTINGS = DriftSettings()
ALARM_STEPS = 2 * SETTINGS.false_alarm_steps  # of one of a domain's two streams
CHANGE_AT = 6_000
SEEDS = range(500, 511)  # others than those of docs/decisions/0008-drift.md


@pytest.mark.parametrize(
    ("stream", "after", "error", "spread", "direction", "median_steps"),
    [
        ("acceptance", 0.45, 0.0, 0.0, "down", 700),
        ("acceptance", 0.50, 0.0, 0.0, "down", 1_200),
        ("acceptance", 0.75, 0.0, 0.0, "up", 700),
        ("acceptance", 0.45, 0.0, 0.15, "down", 1_600),
        ("acceptance", 0.75, 0.0, 0.15, "up", 1_500),
        ("calibration", None, 0.1, 0.15, "up", 800),
        ("calibration", None, -0.1, 0.15, "down", 800),
    ],
)
def test_shifts_are_found_in_time(
    stream: str, after: float | None, error: float, spread: float, direction: str, median_steps: int
) -> None:
    delays, afters, places = [], [], []
    for seed in SEEDS:
        traffic = steps(
            0.6, CHANGE_AT + 3_000, after=after, change_at=CHANGE_AT, error_after=error, spread=spread, seed=seed
        )
        found = [
            (index, shift)
            for index, shift in alarms(traffic, stream, ALARM_STEPS, SETTINGS.min_steps)
            if index >= CHANGE_AT
        ]
        index, shift = found[0] if found else (CHANGE_AT + 3_000, None)
        delays.append(index - CHANGE_AT)
        if shift is not None:
            assert shift.direction == direction
            assert (shift.after > shift.before) == (direction == "up")
            afters.append(shift.after)
            places.append(index - shift.num_steps - CHANGE_AT)
    assert np.median(delays) <= median_steps, sorted(delays)
    assert sum(delay < 3_000 for delay in delays) >= 9, sorted(delays)
    assert np.mean(afters) == pytest.approx(after if stream == "acceptance" and after else error, abs=0.06)
    assert abs(np.median(places)) < 300, sorted(places)


def units(num_steps: int, spread: float, seed: int) -> list[Unit]:
    """Finished requests of geometric length and beta-distributed acceptance, as many as make up so many steps."""
    random = np.random.default_rng(seed)
    lengths = random.geometric(1 / 30, num_steps // 30)
    chances = np.full(len(lengths), 0.6)
    if spread:
        total = 0.6 * 0.4 / spread**2 - 1
        chances = random.beta(0.6 * total, 0.4 * total, len(lengths))
    accepted = random.binomial(lengths, chances)
    return [Unit(float(a), int(n), int(n), i) for i, (a, n) in enumerate(zip(accepted, lengths, strict=True))]


def count_alarms(stream: list[Unit], alarm_steps: int) -> int:
    detector = ShiftDetector(alarm_steps, SETTINGS.min_steps)
    return sum(detector.add(unit) is not None for unit in stream)


@pytest.mark.parametrize("spread", [0.0, pytest.param(0.15, marks=pytest.mark.slow), 0.25])
def test_false_alarms_are_as_rare_as_asked(spread: float) -> None:
    """Five runs of 400,000 steps, enough to tell the rate from twice the rate.  Not far rarer either."""
    streams = [units(400_000, spread, seed) for seed in range(5)]
    num_steps = sum(unit.num_steps for stream in streams for unit in stream)
    often = sum(count_alarms(stream, 20_000) for stream in streams)
    assert 0.3 * num_steps / 20_000 < often <= num_steps / 20_000
    assert sum(count_alarms(stream, 50_000) for stream in streams) <= num_steps / 50_000


@pytest.mark.parametrize("stream", ["acceptance", "calibration"])
def test_false_alarms_of_interleaved_requests(stream: str) -> None:
    count = sum(
        len(alarms(steps(0.6, 60_000, spread=0.15, seed=900 + seed), stream, 10_000, SETTINGS.min_steps))
        for seed in range(5)
    )
    assert count <= 5 * 60_000 / 10_000


def test_steps_as_units_would_break_the_rate() -> None:
    """Why requests are the unit: the same test of single steps takes every run of easy requests for a change."""
    random = np.random.default_rng(3)
    difficulty = np.repeat(random.beta(1.7, 1.1, 4_000), 30)
    single = [Unit(float(ok), 1, 1, i) for i, ok in enumerate(random.random(len(difficulty)) < difficulty)]
    assert count_alarms(single, 20_000) > 3 * len(single) / 20_000


def test_an_alarm_starts_anew() -> None:
    detector = ShiftDetector(1_000, 200)
    low = [Unit(2.0 + i % 3, 10, 10, i) for i in range(100)]
    high = [Unit(7.0 + i % 3, 10, 10, i) for i in range(100, 200)]
    assert all(detector.add(unit) is None for unit in low)
    assert detector.num_steps == 1_000 and detector.mean == pytest.approx(0.3, abs=0.01)
    shift = next(shift for unit in high if (shift := detector.add(unit)))
    assert (shift.direction, shift.first_step) == ("up", 99)
    assert shift.before == pytest.approx(0.3, abs=0.01) and shift.after == pytest.approx(0.8, abs=0.1)
    assert shift.num_steps == 10 * (shift.last_step - 99)
    assert (detector.num_steps, detector.mean) == (0, 0.0)


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "_MAX_UNITS", 50)
    detector = ShiftDetector(10**9, 100)
    for unit in units(30_000, 0.15, 1):
        detector.add(unit)
    assert detector._usual is not None and len(detector._units) == 50
    assert detector._sorted == sorted(unit.score(detector._usual) for unit in detector._units)


def test_bets_are_fair() -> None:
    """The mean growth of every bet is 1 on normal scores, which the rate of false alarms rests on."""
    places = np.random.default_rng(0).normal(size=1_000_000)
    for bet in drift._BETS:
        growth = np.exp(bet * places - bet * bet / 2)
        assert growth.mean() == pytest.approx(1, abs=4 * math.sqrt(math.expm1(bet * bet) / len(places)))
