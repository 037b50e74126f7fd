"""Training steps beside bare passes: real ones on a tiny draft, and records that say what they showed."""

import io
from pathlib import Path

import pytest

from adaptive_spec.bench.progress import Teller
from adaptive_spec.bench.training import StepCost, Timing, measure
from adaptive_spec.bench.training_chart import draw_training
from adaptive_spec.bench.training_report import build_records, print_report
from adaptive_spec.learning.checkpoint import read_checkpoint
from adaptive_spec.records.database import Database
from adaptive_spec.records.runs import get_run
from adaptive_spec.settings import LearningSettings, Settings
from tests.learning.toy import tiny_draft, toy_traces

LEARNING = LearningSettings(rank=4, batch_tokens=128, max_epochs=1, checkpoint_seconds=1e-9)


def test_steps_are_those_of_a_run_and_go_on_over_epochs(tmp_path: Path) -> None:
    traces = toy_traces(12, seed=1)
    costs = measure(tiny_draft(), traces, toy_traces(3, seed=2), LEARNING, tmp_path, 9, Teller(io.StringIO()))
    assert len(costs) == 9
    assert all(cost.num_tokens > 0 and cost.bare.seconds > 0 and cost.step.seconds > 0 for cost in costs)
    saved = read_checkpoint(tmp_path)
    assert saved is not None and saved.position.step == 11, "two that warm up; checkpoints are part of a step"
    database = Database(f"sqlite:///{tmp_path / 'run.db'}")
    assert get_run(database, 1).progress["step"] >= 1, "progress is told as a run tells it"
    database.close()


@pytest.mark.slow
def test_memory_is_flat_over_steps(tmp_path: Path) -> None:
    learning = LEARNING.model_copy(update={"checkpoint_seconds": 0.5})
    traces = toy_traces(40, seed=1)
    costs = measure(tiny_draft(), traces, toy_traces(3, seed=2), learning, tmp_path, 240, Teller(io.StringIO()))
    about, *steps = build_records(costs, Settings())
    assert len({row["step"] for row in steps}) == 240
    grown = about["memory_bytes_at_end"] - about["memory_bytes_settled"]
    assert grown < 180 * 16_384, "of 180 steps, each with logits of 30 to 128 tokens, 128 wide: what one of them leaks"


def made_up(slope: int) -> list[StepCost]:
    """Steps that take twice the bare pass by the clock and a quarter more on a core."""
    return [
        StepCost(100, Timing(0.1, 0.08), Timing(0.2, 0.1), 10_000_000 + 5_000_000 * min(step, 8) + slope * step)
        for step in range(40)
    ]


@pytest.mark.parametrize("slope", [0, 4096])
def test_the_summary_tells_shares_and_the_slope_behind_the_first_quarter(slope: int) -> None:
    about, *steps = build_records(made_up(slope), Settings())
    assert (about["share"], about["cpu_share"]) == (pytest.approx(0.5), pytest.approx(0.8))
    assert about["tokens_per_second"] == pytest.approx(500) and about["bare_tokens_per_second"] == pytest.approx(1000)
    assert about["memory_bytes_per_step"] == about["memory_bytes_per_step_low"] == pytest.approx(slope)
    assert len(steps) == about["num_steps"] == 40


def test_a_goal_that_is_missed_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    records = build_records(made_up(4096), Settings())
    print_report(records)
    told = " ".join(capsys.readouterr().out.split())
    assert "goal 0.70 missed" in told and "+4.00 KiB a step" in told
    draw_training(records, tmp_path / "training.svg")
    assert (tmp_path / "training.svg").stat().st_size > 1000


def test_where_memory_is_not_told_there_is_no_slope() -> None:
    cost = StepCost(1, Timing(1, 1), Timing(1, 1), None)
    about, *_ = build_records([cost] * 20, Settings())
    assert about["memory_bytes_per_step"] is None and about["memory_bytes_at_end"] is None
