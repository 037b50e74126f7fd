"""N-gram overlap: a chain is kept whole when it says about what the target would have said.  Relaxed.

The share of the chain's n-grams that occur among those of the target's own tokens at the same positions, each counted
as often as it occurs in both: the modified n-gram precision of BLEU (Papineni et al. 2002, section 2.1).  An n-gram is
ordered, so the right words in another order do not count.  No distribution is looked at, only argmaxes.
"""

import torch
from torch import Tensor


def ngram_overlap(chain: Tensor, target_tokens: Tensor, chain_lengths: Tensor, size: int) -> Tensor:
    """Return the share of each chain's n-grams that the target's own tokens hold too.

    A chain shorter than ``size`` is compared whole, as one n-gram of its own length; an empty chain agrees.

    Args:
        chain: [rows, chain], padded; target_tokens: [rows, chain], the target's argmax at the same positions.
        chain_lengths: [rows], proposed tokens that are real.
        size: tokens of an n-gram, at least 1.

    Returns:
        [rows] float32 in [0, 1].
    """
    if size < 1:
        raise ValueError("an n-gram has at least one token")
    width, device = chain.shape[1], chain.device
    if not width:
        return torch.ones(len(chain), device=device)
    sizes = chain_lengths.clamp(1, size)
    num_grams = (chain_lengths - sizes + 1).clamp_min(0)
    ours, theirs = _windows(chain, size), _windows(target_tokens, size)  # [rows, grams, size]
    beyond = torch.arange(size, device=device) >= sizes[:, None]  # tokens of a window that a short n-gram lacks
    real = torch.arange(width, device=device) < num_grams[:, None]
    pairs = real[:, :, None] & real[:, None, :]
    in_target = _equal(ours, theirs, beyond) & pairs  # [rows, ours, theirs]
    in_chain = _equal(ours, ours, beyond) & pairs
    earlier = in_chain.tril(-1).sum(-1)  # how often a gram came before in the chain
    counted = (earlier < in_target.sum(-1)) & real
    share = counted.sum(-1) / num_grams.clamp_min(1)
    return torch.where(num_grams > 0, share, 1.0)


def ngram_passes(chain: Tensor, target_tokens: Tensor, chain_lengths: Tensor, size: int, min_overlap: float) -> Tensor:
    """Decide for a chain at a time: every token passes or none.  Arguments as above; returns [rows, chain] bool."""
    overlap = ngram_overlap(chain, target_tokens, chain_lengths, size)
    return (overlap >= min_overlap)[:, None].expand(chain.shape)


def _windows(tokens: Tensor, size: int) -> Tensor:
    """The window of ``size`` tokens that begins at each position; beyond the end stands -1."""
    return torch.nn.functional.pad(tokens, (0, size - 1), value=-1).unfold(1, size, 1)


def _equal(ours: Tensor, theirs: Tensor, beyond: Tensor) -> Tensor:
    return ((ours[:, :, None] == theirs[:, None]) | beyond[:, None, None]).all(-1)
