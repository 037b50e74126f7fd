"""A run rests as long as the bound asks for, no longer, and not at all while nobody decodes."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from adaptive_spec.core import Step
from adaptive_spec.learning.yielding import PaceMeter, Yielding, rest_seconds

STEP_SECONDS, TRAINING_SECONDS = 0.1, 0.25  # per step, alone and beside a run: a slowdown of 60 %


def step(seconds: float, chain_length: int = 3, step_index: int = 1) -> Step:
    return Step(
        request_id="r",
        domain="a",
        release=0,
        step_index=step_index,
        drafter="model",
        chain_length=chain_length,
        num_accepted=0,
        num_emitted=1,
        explored=False,
        draft_seconds=seconds / 2,
        verify_seconds=seconds / 2,
        batch_size=1,
        positions=(),
        at=datetime(2026, 1, 1, tzinfo=UTC),
    )


@hypothesis_settings(max_examples=100, deadline=None)
@given(st.floats(0.1, 100), st.floats(0, 0.99), st.floats(0.1, 1))
def test_work_and_rest_together_cost_the_bound(worked: float, slowdown: float, bound: float) -> None:
    rest = rest_seconds(worked, slowdown, bound)
    lost = slowdown * worked / (worked + rest)
    assert lost <= bound + 1e-9
    assert rest == 0 or lost == pytest.approx(bound)


def test_without_tolerance_a_run_works_in_short_turns() -> None:
    assert rest_seconds(5.0, 0.0, 0.0) == 0.0
    assert rest_seconds(5.0, 0.1, 0.0) == 60.0


def test_steps_are_held_against_those_of_their_shape() -> None:
    meter = PaceMeter()
    for _ in range(20):
        meter.note(step(0.1))
        meter.note(step(0.3, chain_length=6))
        meter.note(step(9.0, step_index=0))  # a prompt
    meter.begin()
    for _ in range(10):
        meter.note(step(0.3, chain_length=6))  # longer chains only: not slower
        meter.note(step(5.0, chain_length=1))  # never seen before
    assert meter.take().slowdown_share == pytest.approx(0)
    for _ in range(10):
        meter.note(step(0.2))
    pace = meter.take()
    assert (pace.num_steps, pace.slowdown_share) == (10, pytest.approx(0.5))
    assert meter.end().num_steps == 20


@dataclass
class Simulation:
    """A decoder, busy or not, beside a process of ``work`` seconds; time is counted, not spent."""

    meter: PaceMeter
    work: float
    busy: bool = True
    paused: bool = False
    rested: float = 0.0
    cores: list[bool] = field(default_factory=list)

    def ended(self, seconds: float) -> bool:
        if self.busy:
            left = seconds
            while left > 0:
                took = STEP_SECONDS if self.paused else TRAINING_SECONDS
                self.meter.note(step(took))
                left -= took
        if self.paused:
            self.rested += seconds
        else:
            self.work -= seconds
        return self.work <= 0

    def pause(self, wanted: bool) -> None:
        self.paused = wanted


def follow(bound: float, busy: bool = True) -> tuple[Simulation, float | None, int]:
    meter = PaceMeter()
    for _ in range(50):
        meter.note(step(STEP_SECONDS))
    simulation = Simulation(meter, work=100.0, busy=busy)
    report = Yielding(meter, bound, simulation.cores.append).follow(simulation.ended, simulation.pause)
    assert not simulation.paused and simulation.cores[0] is True and simulation.cores[-1] is False
    return simulation, report.slowdown_share, report.num_pauses


def test_a_run_that_slows_decoding_too_much_rests() -> None:
    simulation, slowdown, num_pauses = follow(bound=0.2)
    assert simulation.rested == pytest.approx(95 * (0.6 / 0.2 - 1))  # behind every window but the last
    assert num_pauses == 19 and slowdown is not None
    emitted_share = 1 - slowdown  # of the steps that the same seconds would have held
    assert emitted_share >= 0.8 - 0.02
    assert simulation.cores == [True] + [False, True] * 19 + [False]


def test_a_run_within_the_bound_or_beside_nobody_does_not_rest() -> None:
    for bound, busy in ((0.7, True), (0.2, False)):
        simulation, slowdown, num_pauses = follow(bound, busy)
        assert (simulation.rested, num_pauses) == (0, 0)
        assert slowdown == (pytest.approx(0.6) if busy else None)
