"""Measured chains made by hand, and planted traffic whose divergence share at every threshold can be told."""

from collections.abc import Sequence

import numpy as np

from adaptive_spec.records.evidence import RecordedChains


def one_chain(
    chain: Sequence[int] = (1, 2, 3, 4),
    target_tokens: Sequence[int] = (1, 9, 3, 4),
    strict: Sequence[bool] = (True, False, True, True),
    similarities: Sequence[float] = (0.9, 0.5, 0.8, 0.95),
    most_emitted: int = 5,
) -> RecordedChains:
    return RecordedChains(
        chain=np.array([chain]),
        target_tokens=np.array([target_tokens]),
        strict=np.array([strict]),
        similarities=np.array([similarities], np.float32),
        greedy=np.array([True]),
        temperature=np.ones(1),
        lengths=np.array([len(chain)]),
        most_emitted=np.array([most_emitted]),
        measure=np.array(["tv"]),
        request_index=np.array([0]),
    )


def planted(
    num_requests: int, seed: int = 0, *, chains: int = 5, hardness: float = 0.5, temperature: float = 1.0
) -> RecordedChains:
    """Requests of so many chains of one token.  Similarity is uniform in [0, 1] and says nothing of the strict verdict.

    A request's tokens are refused with a probability of its own, uniform in [0, hardness].  Under ``logits`` at
    ``min_similarity`` t a step emits two tokens where it keeps its own, which a refused one is with probability 1 - t:
    the share of diverging tokens is about refused (1 - t) / (2 - refused t).
    """
    random = np.random.default_rng(seed)
    total = num_requests * chains
    refused = np.repeat(random.uniform(0, hardness, num_requests), chains)
    strict = random.random(total) >= refused
    return RecordedChains(
        chain=np.ones((total, 1), np.int64),
        target_tokens=np.where(strict, 1, 2)[:, None],
        strict=strict[:, None],
        similarities=random.random((total, 1)).astype(np.float32),
        greedy=np.full(total, True),
        temperature=np.full(total, temperature),
        lengths=np.ones(total, np.int64),
        most_emitted=np.full(total, 2),
        measure=np.full(total, "tv"),
        request_index=np.repeat(np.arange(num_requests), chains),
    )
