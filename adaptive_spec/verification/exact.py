"""Exact verification: greedy match and rejection sampling.  Lossless.

Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2).
"""

import torch
from torch import Tensor

from adaptive_spec.verification.distribution import sample


def verify_greedy(target_tokens: Tensor, chain: Tensor, chain_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the longest prefix that the target would have chosen itself.

    Args:
        target_tokens: [rows, chain + 1], the target's argmax after each prefix.
        chain: [rows, chain], proposed tokens, padded.
        chain_lengths: [rows], proposed tokens that are real.

    Returns:
        num_accepted [rows], and the recovered or bonus token [rows].
    """
    real = torch.arange(chain.shape[1], device=chain.device) < chain_lengths[:, None]
    matches = (target_tokens[:, :-1] == chain) & real
    num_accepted = matches.long().cumprod(-1).sum(-1)
    return num_accepted, target_tokens.gather(1, num_accepted[:, None]).squeeze(1)


def verify_sampled(
    target_probs: Tensor,
    draft_probs: Tensor,
    chain: Tensor,
    chain_lengths: Tensor,
    accept_uniforms: Tensor,
    next_uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: the emitted tokens have exactly the target's distribution.

    Token x of the chain is kept with probability min(1, target(x) / draft(x)).  At the first rejection the recovered
    token comes from the residual max(0, target - draft), renormalised; after a full chain the bonus token comes from
    the target.

    Args:
        target_probs: [rows, chain + 1, vocab].
        draft_probs: [rows, chain, vocab], the distributions the chain was drawn from.
        chain: [rows, chain]; chain_lengths: [rows].
        accept_uniforms: [rows, chain]; next_uniforms: [rows]; in [0, 1).

    Returns:
        num_accepted [rows], and the recovered or bonus token [rows].
    """
    rows, width = chain.shape
    real = torch.arange(width, device=chain.device) < chain_lengths[:, None]
    of_target = target_probs[:, :-1].gather(-1, chain[..., None]).squeeze(-1)
    of_draft = draft_probs.gather(-1, chain[..., None]).squeeze(-1)
    accepted = (accept_uniforms * of_draft < of_target) & real
    num_accepted = accepted.long().cumprod(-1).sum(-1)
    at_end = target_probs[torch.arange(rows, device=chain.device), num_accepted]
    rejected = num_accepted < chain_lengths
    padded = torch.cat([draft_probs, torch.zeros_like(target_probs[:, :1])], dim=1)
    of_draft_at_end = padded[torch.arange(rows, device=chain.device), num_accepted]
    residual = torch.where(rejected[:, None], (at_end - of_draft_at_end).clamp_min(0), at_end)
    # Target equal to draft to the last bit leaves no residual; rejection then had probability 0 up to rounding.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, at_end)
    return num_accepted, sample(residual, next_uniforms)
