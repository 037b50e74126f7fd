"""Distributions that the target computes anew: the recorded ones, and whole ones that leave nothing to the tail."""

import copy
from dataclasses import replace

import torch

from adaptive_spec.core import Trace
from adaptive_spec.learning.batches import make_batch
from adaptive_spec.learning.distil import distil
from adaptive_spec.learning.losses import LOSSES, bucketed_log_probs, distillation_loss
from adaptive_spec.learning.teacher import Teacher
from adaptive_spec.settings import LearningSettings
from tests.learning.toy import TOP_K, VOCAB, tiny_draft, toy_traces

CPU = torch.device("cpu")


def recorded_by(target: torch.nn.Module, trace: Trace) -> Trace:
    """The trace as verification would have left it: the target's own distribution at every completion token."""
    with torch.inference_mode():
        logits = target(torch.tensor([trace.tokens])).logits[0, trace.prompt_tokens - 1 : -1]
    values, ids = logits.float().log_softmax(-1).topk(TOP_K)
    tail = 1 - values.exp().sum(-1)
    return replace(trace, top_ids=ids.numpy(), top_log_probs=values.numpy(), tail_mass=tail.numpy())


def test_as_many_tokens_as_recorded_give_what_was_recorded() -> None:
    target = tiny_draft(seed=5)
    traces = [recorded_by(target, trace) for trace in toy_traces(3, seed=1)]
    stored, anew = make_batch(traces, CPU), make_batch(traces, CPU, Teacher(target, TOP_K))
    torch.testing.assert_close(anew.top_ids, stored.top_ids)
    torch.testing.assert_close(anew.target_log_probs, stored.target_log_probs, atol=1e-4, rtol=1e-4)
    assert torch.equal(anew.target_argmax, stored.target_argmax)


def test_a_whole_distribution_gives_every_loss_as_by_its_definition() -> None:
    target, draft = tiny_draft(seed=5), tiny_draft(seed=6)
    trace = toy_traces(1, seed=1)[0]
    batch = make_batch([trace], CPU, Teacher(target))
    assert batch.top_ids.shape == (batch.num_tokens, VOCAB) and batch.target_log_probs[:, -1].exp().max() < 1e-7
    with torch.inference_mode():
        tokens = torch.tensor([trace.tokens])
        rows = slice(trace.prompt_tokens - 1, -1)
        p, q = (model(tokens).logits[0, rows].double().softmax(-1) for model in (target, draft))
        ours = bucketed_log_probs(draft(tokens).logits[0, rows], batch.top_ids)
    middle = (p + q) / 2
    divergence = {
        "kl": (p * (p / q).log()).sum(-1),
        "reverse_kl": (q * (q / p).log()).sum(-1),
        "tv": 0.5 * (p - q).abs().sum(-1),
        "jsd": 0.5 * ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1)),
    }
    weight = (-3 * torch.minimum(p, q).sum(-1)).exp()
    divergence["lk_hybrid"] = weight * divergence["kl"] + (1 - weight) * divergence["tv"]
    assert set(divergence) == set(LOSSES)
    for name, wanted in divergence.items():
        found = distillation_loss(name, batch.target_log_probs, ours)
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-3)


def test_a_run_learns_from_a_teacher_instead_of_the_records() -> None:
    target = tiny_draft(seed=5)
    traces = toy_traces(24, seed=1)  # whose records say something else than this target
    learning = LearningSettings(rank=8, max_epochs=6, batch_tokens=256, learning_rate=2e-2)
    told = [recorded_by(target, trace) for trace in toy_traces(8, seed=2)]
    _, with_teacher = distil(
        copy.deepcopy(tiny_draft(seed=6)), traces, told, learning, lambda _: None, teacher=Teacher(target)
    )
    _, without = distil(copy.deepcopy(tiny_draft(seed=6)), traces, told, learning, lambda _: None)
    assert with_teacher.overlap_after > with_teacher.overlap_before
    assert with_teacher.overlap_after > without.overlap_after
