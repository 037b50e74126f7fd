"""Exact verification: greedy match and rejection sampling.  Lossless.

Leviathan et al. 2023 (algorithm 1) and Chen et al. 2023 (algorithm 2).  The verdict on a position takes the tokens
before it as given, so the same functions also judge tokens that a relaxed rule has kept.
"""

import torch
from torch import Tensor

from adaptive_spec.verification.distribution import sample


def accepts_greedy(target_tokens: Tensor, chain: Tensor) -> Tensor:
    """Whether the target would have chosen each token itself.

    Args:
        target_tokens: [rows, chain + 1], the target's argmax after each prefix.
        chain: [rows, chain], proposed tokens, padded.

    Returns:
        [rows, chain] bool.
    """
    return target_tokens[:, :-1] == chain


def accepts_sampled(target_probs: Tensor, draft_probs: Tensor, chain: Tensor, uniforms: Tensor) -> Tensor:
    """Rejection sampling's verdict: token x passes with probability min(1, target(x) / draft(x)).

    Args:
        target_probs: [rows, chain + 1, vocab].
        draft_probs: [rows, chain, vocab], the distributions the chain was drawn from.
        chain: [rows, chain].
        uniforms: [rows, chain] in [0, 1).

    Returns:
        [rows, chain] bool.
    """
    of_target = target_probs[:, :-1].gather(-1, chain[..., None]).squeeze(-1)
    of_draft = draft_probs.gather(-1, chain[..., None]).squeeze(-1)
    return accepts(of_target, of_draft, uniforms)


def accepts(of_target: Tensor, of_draft: Tensor, uniforms: Tensor) -> Tensor:
    """The same of tokens' probabilities: all of one shape, [...]."""
    return uniforms * of_draft < of_target


def kept(passes: Tensor, chain_lengths: Tensor) -> Tensor:
    """Return the length of the longest prefix of real tokens that all pass.

    Args:
        passes: [rows, chain] bool.
        chain_lengths: [rows], proposed tokens that are real.

    Returns:
        [rows].
    """
    real = torch.arange(passes.shape[1], device=passes.device) < chain_lengths[:, None]
    return (passes & real).long().cumprod(-1).sum(-1)


def next_greedy(target_tokens: Tensor, num_kept: Tensor) -> Tensor:
    """The recovered or bonus token [rows]: the target's own after what was kept."""
    return target_tokens.gather(1, num_kept[:, None]).squeeze(1)


def next_sampled(
    target_probs: Tensor, draft_probs: Tensor, chain_lengths: Tensor, num_kept: Tensor, uniforms: Tensor
) -> Tensor:
    """The token after what was kept.

    Where rejection sampling refused a token, the recovered token comes from the residual max(0, target - draft),
    renormalised; after a full chain the bonus token comes from the target.

    Args:
        target_probs: [rows, chain + 1, vocab]; draft_probs: [rows, chain, vocab].
        chain_lengths, num_kept: [rows].
        uniforms: [rows] in [0, 1).

    Returns:
        [rows].
    """
    rows = torch.arange(len(num_kept), device=num_kept.device)
    at_end = target_probs[rows, num_kept]
    rejected = num_kept < chain_lengths
    if not draft_probs.shape[1]:
        return sample(at_end, uniforms)
    of_draft = draft_probs[rows, num_kept.clamp_max(draft_probs.shape[1] - 1)]
    residual = torch.where(rejected[:, None], (at_end - of_draft).clamp_min(0), at_end)
    # Target equal to draft to the last bit leaves no residual; rejection then had probability 0 up to rounding.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, at_end)
    return sample(residual, uniforms)
