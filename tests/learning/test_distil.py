"""Distillation learns, stops, continues and touches only the adapter."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptive_spec.errors import NotEnoughDataError, ReleaseError
from adaptive_spec.learning.distil import DistilReport, distil
from adaptive_spec.learning.evaluate import score
from adaptive_spec.learning.losses import LOSSES
from adaptive_spec.releases.bundle import load_adapter_delta
from adaptive_spec.settings import LearningSettings
from tests.learning.toy import tiny_draft, toy_traces

FAST = LearningSettings(rank=8, learning_rate=2e-2, batch_tokens=256, max_epochs=8)


def ignore(progress: dict[str, Any]) -> None:
    pass


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def test_held_out_agreement_rises_and_only_the_adapter_changes() -> None:
    draft = tiny_draft()
    pristine = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    seen: list[dict[str, Any]] = []
    held_out = toy_traces(10, seed=2)
    model, report = distil(draft, toy_traces(60, seed=1), held_out, FAST, seen.append)
    assert report.agreement_before < 0.2
    assert report.agreement_after > 0.6
    assert report.overlap_after > report.overlap_before
    rows = score(model, held_out)
    tokens = [len(trace.top_ids) for trace in held_out]
    mean = sum(row.agreement * n for row, n in zip(rows, tokens, strict=True)) / sum(tokens)
    assert mean == pytest.approx(report.agreement_after), "the best epoch's weights are the ones returned"
    for name, tensor in tiny_draft().state_dict().items():
        assert torch.equal(pristine[name], tensor)
    with model.disable_adapter(), torch.no_grad():
        ids = torch.tensor([[1, 4, 7]])
        assert torch.equal(model(ids).logits, tiny_draft()(ids).logits)
    assert len(seen) == report.steps
    held_out_keys = {"held_out_agreement", "held_out_acceptance_length"}
    assert seen[0].keys() == {"phase", "step", "steps", "loss", *held_out_keys, "tokens_per_second", "seconds_left"}
    assert report.acceptance_length_after > report.acceptance_length_before >= 1
    assert 0 < report.throughput_share < 2
    assert [row["epoch"] for row in report.history] == list(range(len(report.history))) and len(report.history) > 3
    assert all(row["peak_memory_bytes"] > 1 << 24 for row in report.history)
    adapted = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert adapted and not any("embed" in name or "lm_head" in name for name in adapted)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_learns(loss: str) -> None:
    settings = FAST.model_copy(update={"loss": loss, "max_epochs": 3})
    _, report = distil(tiny_draft(), toy_traces(40, seed=1), toy_traces(5, seed=2), settings, ignore)
    assert report.overlap_after > report.overlap_before


def test_the_same_seed_gives_the_same_adapter() -> None:
    settings = FAST.model_copy(update={"max_epochs": 1})
    runs = [distil(tiny_draft(), toy_traces(10, seed=1), toy_traces(3, seed=2), settings, ignore) for _ in range(2)]
    first, second = (dict(model.named_parameters()) for model, _ in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DistilReport]:
    """An adapter of rank 8 that has learned, and its report."""
    model, report = distil(tiny_draft(), toy_traces(60, seed=1), toy_traces(6, seed=2), FAST, ignore)
    return save(model, tmp_path_factory.mktemp("parent")), report


@pytest.mark.parametrize("rank", [4, 8, 12])
def test_it_continues_from_the_parent_at_any_rank(rank: int, parent: tuple[Path, DistilReport], tmp_path: Path) -> None:
    traces, held_out = toy_traces(60, seed=1), toy_traces(6, seed=2)
    folder, first = parent
    settings = FAST.model_copy(update={"rank": rank, "time_limit_seconds": 1e-9})
    model, report = distil(tiny_draft(), traces, held_out, settings, ignore, folder)
    assert (report.stopped, report.steps) == ("time_limit", 0)
    if rank >= 8:
        assert report.agreement_before == pytest.approx(first.agreement_after, abs=0.02)
        again = load_adapter_delta(save(model, tmp_path / "again"), tiny_draft())
        for name, delta in load_adapter_delta(folder, tiny_draft()).items():
            torch.testing.assert_close(again[name], delta, atol=1e-4, rtol=1e-3)
    else:
        assert report.agreement_before > 0.2


def test_it_stops_early_and_keeps_the_start_when_nothing_helps() -> None:
    settings = FAST.model_copy(update={"learning_rate": 1e-12})
    _, report = distil(tiny_draft(), toy_traces(6, seed=1), toy_traces(3, seed=2), settings, ignore)
    assert (report.stopped, report.best_epoch) == ("early", 0)
    assert report.agreement_after == report.agreement_before


def test_pauses_do_not_count_as_work() -> None:
    paused: list[float] = []

    def pause(told: dict[str, Any]) -> float:
        began = time.monotonic()
        time.sleep(0.1)
        paused.append(time.monotonic() - began)
        return paused[-1]

    settings = FAST.model_copy(update={"max_epochs": 2, "batch_tokens": 128})
    began = time.monotonic()
    _, report = distil(tiny_draft(), toy_traces(20, seed=1), toy_traces(3, seed=2), settings, pause)
    assert len(paused) == report.steps > 2
    assert 0 < report.seconds <= time.monotonic() - began - sum(paused)


def test_no_traces_and_a_foreign_parent_are_errors(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughDataError):
        distil(tiny_draft(), [], toy_traces(3, seed=2), FAST, ignore)
    with pytest.raises(ReleaseError):
        distil(tiny_draft(), toy_traces(3, seed=1), toy_traces(3, seed=2), FAST, ignore, tmp_path)
