"""Weights of tokens against their definition, and that each option does what it says to a run."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from adaptive_spec.learning.distil import distil
from adaptive_spec.learning.emphasis import is_even, survival_weights, token_weights
from adaptive_spec.settings import LearningSettings
from tests.learning.toy import tiny_draft, toy_traces

FAST = LearningSettings(rank=8, learning_rate=2e-2, batch_tokens=256, max_epochs=2, checkpoint_seconds=0)


def reference(accepted: list[float], places: list[int], chain_length: int) -> list[float]:
    """Begin a chain at every token and follow it, one token after another."""
    weights = [0.0] * len(accepted)
    for start in range(len(accepted)):
        reached = 1.0
        for at in range(start, min(start + chain_length, len(accepted))):
            if at > start and places[at] == 0:
                break  # the next trace
            weights[at] += reached
            reached *= accepted[at]
    mean = sum(weights) / len(weights)
    return [weight / mean for weight in weights]


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=9), min_size=1, max_size=4), st.integers(1, 7))
def test_survival_weights_follow_every_chain(traces: list[list[float]], chain_length: int) -> None:
    accepted = [value for trace in traces for value in trace]
    places = [place for trace in traces for place in range(len(trace))]
    found = survival_weights(torch.tensor(accepted, dtype=torch.double), torch.tensor(places), chain_length)
    torch.testing.assert_close(found, torch.tensor(reference(accepted, places, chain_length), dtype=torch.double))


def test_errors_count_more_and_sure_agreement_nothing() -> None:
    settings = LearningSettings(error_weight=3.0, skip_confidence=0.9)
    agrees = torch.tensor([True, True, False, False])
    confidence = torch.tensor([0.95, 0.5, 0.95, 0.1])
    found = token_weights(settings, torch.ones(4), agrees, confidence, torch.arange(4))
    assert found.tolist() == [0.0, 1.0, 3.0, 3.0]
    assert is_even(LearningSettings()) and not is_even(settings) and not is_even(LearningSettings(survival_tokens=4))


def train(**update: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    settings = FAST.model_copy(update=update)
    model, report = distil(tiny_draft(), toy_traces(30, seed=1), toy_traces(6, seed=2), settings, told.append)
    told.append(report.to_dict())
    return {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}, told


@pytest.mark.parametrize("option", [{"survival_tokens": 4}, {"error_weight": 2.0}, {"skip_confidence": 0.005}])
def test_each_option_changes_what_is_learned(option: dict[str, Any]) -> None:
    plain, _ = train()
    other, told = train(**option)
    first, *_, last = told[-1]["history"]
    assert last["overlap"] > first["overlap"]
    assert any(not torch.equal(plain[name], other[name]) for name in plain)


def test_gradients_of_batches_add_up_to_those_of_one() -> None:
    """One epoch in one optimiser step: all traces in one batch, or in many."""
    whole, one = train(batch_tokens=100_000, max_epochs=1)
    parts, many = train(batch_tokens=64, accumulate=1_000, max_epochs=1)
    assert (one[-2]["step"], many[-2]["step"]) == (1, 1)
    assert many[-2]["loss"] == pytest.approx(one[-2]["loss"], rel=1e-4)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], atol=2e-4, rtol=0)
