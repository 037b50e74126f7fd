"""Distillation losses on sparse targets.  Pure: tensors in, tensors out.

A trace keeps the target's top-K log-probs and the mass of the rest (the *tail*).  Every loss here sees K + 1 outcomes:
the K tokens and the tail as one bucket, so both sides are proper distributions and nothing is renormalised away.
Called by ``distil`` and ``heal``; the same functions score held-out text in ``evaluate``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOSSES = ("kl", "reverse_kl", "jsd", "tv", "lk_hybrid")
_SMALLEST = 1e-8


def bucketed_log_probs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the draft's log-probs on the target's top-K tokens, and of the tail as last column.

    Args:
        logits: [tokens, vocab], any float type; the normaliser is computed in float32.
        token_ids: [tokens, top_k], the target's most probable tokens.

    Returns:
        [tokens, top_k + 1] float32 log-probabilities that sum to one.
    """
    log_probs: Tensor = _LogProbsAt.apply(logits.float(), token_ids)
    tail = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, tail.clamp_min(_SMALLEST).log()], dim=-1)


class _LogProbsAt(torch.autograd.Function):
    """``logits.log_softmax(-1).gather(-1, token_ids)`` at the cost of one softmax, forward and backward together.

    Of [tokens, vocab] only the probabilities are made.  They give the normaliser, log sum exp = max - log p(max), and
    are the backward pass but for the few tokens asked for: d/d logit(v) = sum over i of g(i) (1[v = i] - p(v)).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor) -> Tensor:
        ctx.probs = logits.softmax(-1)
        ctx.save_for_backward(token_ids)
        largest, at = logits.max(-1, keepdim=True)
        return logits.gather(-1, token_ids) - (largest - ctx.probs.gather(-1, at).log())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (token_ids,) = ctx.saved_tensors
        probs, ctx.probs = ctx.probs, None  # overwritten: there is no second backward pass
        spread = probs.mul_(-gradient.sum(-1, keepdim=True))
        return spread.scatter_add_(-1, token_ids, gradient), None


def with_tail(top_log_probs: Tensor, tail_mass: Tensor) -> Tensor:
    """Append the tail bucket.  top_log_probs: [tokens, top_k]; tail_mass: [tokens] -> [tokens, top_k + 1]"""
    tail = tail_mass.float().clamp_min(_SMALLEST).log().unsqueeze(-1)
    return torch.cat([top_log_probs.float(), tail], dim=-1)


def overlap(target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Probability that exact verification accepts: sum of min(target, draft).  (Leviathan et al. 2023, eq. 9)

    Args and return: [tokens, buckets] each -> [tokens].  The tail is counted as one token: an upper bound.
    """
    return torch.minimum(target_log_probs.exp(), draft_log_probs.exp()).sum(-1)


def distillation_loss(name: str, target_log_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """Return the loss per token.

    Args:
        name: one of ``LOSSES``.  ``lk_hybrid`` is lambda KL + (1 - lambda) TV with lambda = exp(-3 overlap), the
            overlap detached (arXiv 2602.23881): KL while the draft is cold, total variation once it is warm.
        target_log_probs, draft_log_probs: [tokens, buckets], in nats.

    Returns:
        [tokens], non-negative.

    Raises:
        ValueError: an unknown name.
    """
    target, draft = target_log_probs.exp(), draft_log_probs.exp()
    forward_kl = (target * (target_log_probs - draft_log_probs)).sum(-1)
    total_variation = 0.5 * (target - draft).abs().sum(-1)
    if name == "kl":
        return forward_kl
    if name == "reverse_kl":
        return (draft * (draft_log_probs - target_log_probs)).sum(-1)
    if name == "tv":
        return total_variation
    if name == "jsd":
        middle = ((target + draft) / 2).clamp_min(_SMALLEST).log()
        to_middle = (target * (target_log_probs - middle)).sum(-1)
        return 0.5 * (to_middle + (draft * (draft_log_probs - middle)).sum(-1))
    if name == "lk_hybrid":
        weight = torch.exp(-3 * overlap(target_log_probs, draft_log_probs).detach())
        return weight * forward_kl + (1 - weight) * total_variation
    raise ValueError(f"unknown loss {name!r}; choose one of {', '.join(LOSSES)}")
