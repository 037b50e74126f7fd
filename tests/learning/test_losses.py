"""Each loss against plain loops, its zero, and its gradient."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from adaptive_spec.learning.losses import LOSSES, bucketed_log_probs, distillation_loss, overlap, with_tail

logit_rows = st.lists(st.lists(st.floats(-6, 6), min_size=7, max_size=7), min_size=1, max_size=3)


def reference(name: str, target: list[float], draft: list[float]) -> float:
    """One token's loss from probabilities, without tensors."""
    shared = variation = forward = backward = jsd = 0.0
    for t, d in zip(target, draft, strict=True):
        shared += min(t, d)
        variation += abs(t - d) / 2
        forward += t * math.log(t / d)
        backward += d * math.log(d / t)
        middle = (t + d) / 2
        jsd += (t * math.log(t / middle) + d * math.log(d / middle)) / 2
    weight = math.exp(-3 * shared)
    hybrid = weight * forward + (1 - weight) * variation
    return {"kl": forward, "reverse_kl": backward, "tv": variation, "jsd": jsd, "lk_hybrid": hybrid}[name]


def both(target: list[list[float]], draft: list[list[float]]) -> tuple[Tensor, Tensor]:
    rows = min(len(target), len(draft))
    return torch.tensor(target[:rows]).log_softmax(-1), torch.tensor(draft[:rows]).log_softmax(-1)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=40, deadline=None)
@given(logit_rows, logit_rows)
def test_equals_the_plain_loop(name: str, target: list[list[float]], draft: list[list[float]]) -> None:
    target_log_probs, draft_log_probs = both(target, draft)
    losses = distillation_loss(name, target_log_probs, draft_log_probs)
    for row, loss in enumerate(losses.tolist()):
        plain = reference(name, target_log_probs[row].exp().tolist(), draft_log_probs[row].exp().tolist())
        assert loss == pytest.approx(plain, rel=1e-3, abs=2e-6)
        assert loss >= -2e-6


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=20, deadline=None)
@given(logit_rows)
def test_is_zero_at_equality(name: str, logits: list[list[float]]) -> None:
    log_probs, same = both(logits, logits)
    assert distillation_loss(name, log_probs, same).abs().max() < 1e-6


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_step_reduces_it(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(6, 9, generator=generator).log_softmax(-1)
    logits = torch.randn(6, 9, generator=generator).requires_grad_(True)
    before = distillation_loss(name, target, logits.log_softmax(-1)).mean()
    (gradient,) = torch.autograd.grad(before, logits)
    after = distillation_loss(name, target, (logits - 0.2 * gradient).log_softmax(-1)).mean()
    assert after < before


def test_unknown_loss_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="lk_hybrid"):
        distillation_loss("mse", torch.zeros(1, 2), torch.zeros(1, 2))


@settings(max_examples=30, deadline=None)
@given(logit_rows, logit_rows)
def test_overlap_is_one_minus_total_variation(target: list[list[float]], draft: list[list[float]]) -> None:
    target_log_probs, draft_log_probs = both(target, draft)
    variation = distillation_loss("tv", target_log_probs, draft_log_probs)
    torch.testing.assert_close(overlap(target_log_probs, draft_log_probs), 1 - variation, atol=1e-5, rtol=0)


@settings(max_examples=30, deadline=None)
@given(logit_rows)
def test_buckets_are_the_top_tokens_and_the_rest(logits: list[list[float]]) -> None:
    values = torch.tensor(logits)
    ids = values.topk(3, dim=-1).indices
    probs = bucketed_log_probs(values, ids).exp()
    full = values.softmax(-1)
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(values)), atol=1e-5, rtol=0)
    for row in range(len(values)):
        for column in range(3):
            assert probs[row, column].item() == pytest.approx(full[row, ids[row, column]].item(), abs=1e-6)


def test_an_empty_tail_stays_finite() -> None:
    log_probs = with_tail(torch.tensor([[0.5, 0.5]]).log(), torch.zeros(1))
    assert torch.isfinite(log_probs).all() and log_probs.shape == (1, 3)
    sharp = bucketed_log_probs(torch.tensor([[90.0, 0.0, 0.0]]), torch.tensor([[0, 1]]))
    for name in LOSSES:
        assert torch.isfinite(distillation_loss(name, log_probs, sharp)).all()


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_log_probs_and_their_gradient_equal_the_plain_ones(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    plain = (torch.randn(30, 500, generator=generator) * scale).requires_grad_(True)
    fast = plain.detach().clone().requires_grad_(True)
    token_ids = torch.stack([torch.randperm(500, generator=generator)[:8] for _ in range(30)])
    token_ids[0] = torch.arange(8).flip(0)
    asked = plain.log_softmax(-1).gather(-1, token_ids)
    found = bucketed_log_probs(fast, token_ids)
    torch.testing.assert_close(found[:, :-1], asked, rtol=1e-5, atol=1e-5)
    pull = torch.randn(asked.shape, generator=generator)
    (asked * pull).sum().backward()
    (found[:, :-1] * pull).sum().backward()
    assert plain.grad is not None and fast.grad is not None and float(plain.grad.abs().max()) > 0.01
    torch.testing.assert_close(fast.grad, plain.grad, rtol=1e-4, atol=1e-6)


def test_a_token_asked_for_twice_gets_both_gradients() -> None:
    logits = torch.zeros(1, 4, requires_grad=True)
    bucketed_log_probs(logits, torch.tensor([[2, 2]]))[:, :-1].sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, -0.5, 1.5, -0.5]]))


def test_half_precision_logits_get_gradients_of_their_type() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_(True)
    found = bucketed_log_probs(logits, torch.tensor([[0, 1], [2, 3], [4, 5]]))
    found.sum().backward()
    assert found.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == torch.bfloat16
