"""What relaxed verification gives up, and the limit on it.

A token *diverges* when it is kept although exact verification would have refused it at that place.  The strict verdict
is computed on the same numbers, without a further forward.
"""

import torch
from torch import Tensor


def within_allowance(strict: Tensor, passes: Tensor, allowance: Tensor) -> Tensor:
    """Let tokens pass that the strict rule accepts, and so many diverging ones as a row is allowed.

    What the strict rule accepts costs nothing, so a relaxed rule never keeps less than exact verification.

    Args:
        strict, passes: [rows, chain] bool, by the strict and by the relaxed rule.
        allowance: [rows], tokens that may diverge.

    Returns:
        [rows, chain] bool.
    """
    diverging = passes & ~strict
    return strict | (diverging & (diverging.cumsum(-1) <= allowance[:, None]))


def diverging_tokens(strict: Tensor, num_kept: Tensor) -> Tensor:
    """Which kept tokens exact verification would have refused: [rows, chain] bool.  num_kept: [rows]."""
    return ~strict & (torch.arange(strict.shape[1], device=strict.device) < num_kept[:, None])


def given_up_nats(target_logits: Tensor, chain: Tensor) -> Tensor:
    """How much less probable each token is to the target than its best, in nats: [..., chain], >= 0.

    Args:
        target_logits: [..., chain, vocab], not necessarily normalised.
        chain: [..., chain].
    """
    of_token = target_logits.gather(-1, chain[..., None]).squeeze(-1)
    return (target_logits.amax(-1) - of_token).float()
