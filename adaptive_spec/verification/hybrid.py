"""Hybrid: the cheap n-gram screen first, and distributions are compared only where it passes.  Relaxed."""

from collections.abc import Callable

import torch
from torch import Tensor

from adaptive_spec.verification.ngram import ngram_overlap
from adaptive_spec.verification.transfer import read


def hybrid_passes(
    chain: Tensor,
    target_tokens: Tensor,
    chain_lengths: Tensor,
    size: int,
    min_overlap: float,
    similarity_of: Callable[[list[int]], Tensor],
    min_similarity: float,
) -> Tensor:
    """A token passes where its chain's overlap and its position's similarity both reach their thresholds.

    Which rows pass the screen is read by the host, one look: what it saves, passes over the whole vocabulary at every
    position of every refused chain, costs more.

    Args:
        chain, target_tokens, chain_lengths, size: as of ``ngram_overlap``.
        similarity_of: called at most once, with the rows that passed the screen; returns theirs, [some rows, chain].

    Returns:
        [rows, chain] bool.
    """
    screened = (ngram_overlap(chain, target_tokens, chain_lengths, size) >= min_overlap) & (chain_lengths > 0)
    passes = torch.zeros(chain.shape, dtype=torch.bool, device=chain.device)
    rows = read(screened)[0].nonzero()[0].tolist()
    if rows:
        passes[rows] = similarity_of(rows) >= min_similarity
    return passes
