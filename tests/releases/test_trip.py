"""The trip wire: within the stated steps where acceptance breaks, and never for what the live release does as well."""

import random

import pytest

from adaptive_spec.core import Step
from adaptive_spec.releases.trip import LOOP_STEPS, MOST_ERRORS, STEPS_PER_REQUEST, TRIP_STEPS, TripWire
from tests.records.rows import make_step


def step(request_id: str, release: int, accepted: bool) -> Step:
    positions = ((0.9, 0.8, True), (0.5, 0.4, False)) if accepted else ((0.5, 0.4, False),)
    return make_step(request_id, 1, release=release, positions=positions)


def walk(canary: float, live: float, steps: int, seed: int = 0, share: float = 0.2) -> tuple[str | None, int]:
    """Serve requests of 20 steps; return why the wire tripped, and the canary's counted steps until then."""
    rng, wire, counted = random.Random(seed), TripWire(2), 0
    for request in range(steps // 20):
        release = 2 if rng.random() < share else 1
        for index in range(20):
            wire.note(step(f"r{request}", release, rng.random() < (canary if release == 2 else live)))
            counted += release == 2 and index < STEPS_PER_REQUEST
            if wire.reason:
                return wire.reason, counted
    return None, counted


@pytest.mark.parametrize(("rate", "word", "steps"), [(0.0, "nothing", TRIP_STEPS), (1.0, "everything", LOOP_STEPS)])
def test_broken_acceptance_is_found_within_the_stated_steps(rate: float, word: str, steps: int) -> None:
    for seed in range(5):
        reason, counted = walk(rate, 0.6, 9000, seed)
        assert reason is not None and word in reason and counted == steps


@pytest.mark.parametrize(
    ("canary", "live"), [(0.6, 0.6), (0.25, 0.6), (0.15, 0.1), (0.93, 0.6), (0.0, 0.05), (1.0, 0.97)]
)
def test_ordinary_traffic_trips_nothing(canary: float, live: float) -> None:
    for seed in range(3):
        reason, counted = walk(canary, live, 6000, seed)
        assert reason is None and counted > 10 * TRIP_STEPS


def test_one_request_cannot_speak_for_a_release() -> None:
    wire = TripWire(2)
    for index in range(50):
        wire.note(step(f"live {index}", 1, index % 2 == 0))
    for _ in range(2 * LOOP_STEPS):
        wire.note(step("a loop", 2, True))
    assert wire.reason is None


def test_errors_of_the_canary_alone_trip() -> None:
    wire = TripWire(2)
    for _ in range(10):
        wire.note_error(1)
        wire.note_error(2)
    assert wire.reason is None
    other = TripWire(2)
    for count in range(1, MOST_ERRORS + 2):
        other.note_error(2)
        assert (other.reason is not None) == (count > MOST_ERRORS)
    other.trip("a second reason")
    assert other.reason is not None and "error" in other.reason
