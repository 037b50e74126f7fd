"""How alike two distributions over the vocabulary are, in [0, 1], larger is more alike, 1 is equal.

| measure | similarity | of |
| --- | --- | --- |
| ``cosine`` | target . draft / (|target| |draft|) | probabilities as vectors |
| ``kl`` | exp(-KL(target || draft)) | 0 where the draft excludes a token that the target may say |
| ``reverse_kl`` | exp(-KL(draft || target)) | 0 where the draft may say a token that the target excludes |
| ``js`` | 1 - JS / ln 2 | Jensen-Shannon divergence (Lin 1991), at most ln 2 |
| ``tv`` | sum of min(target, draft) = 1 - TV | the acceptance that rejection sampling expects (Leviathan et al. 2023) |

exp(-KL) is the geometric mean, under the first distribution, of the ratio of the second to it.  Log-probs go in, so
that nothing underflows; -inf is a token that was truncated away.
"""

import math

import torch
from torch import Tensor


def similarity(target_log_probs: Tensor, draft_log_probs: Tensor, measure: str) -> Tensor:
    """Compare distributions.

    Args:
        target_log_probs, draft_log_probs: [..., vocab] float32, normalised.
        measure: cosine, kl, reverse_kl, js or tv.

    Returns:
        [...] float32 in [0, 1].
    """
    target, draft = target_log_probs, draft_log_probs
    match measure:
        case "kl":
            found = (-_kl(target, draft)).exp()
        case "reverse_kl":
            found = (-_kl(draft, target)).exp()
        case "js":
            middle = torch.logaddexp(target, draft) - math.log(2)
            found = 1 - (_kl(target, middle) + _kl(draft, middle)) / (2 * math.log(2))
        case "tv":
            found = torch.minimum(target, draft).exp().sum(-1)
        case "cosine":
            found = torch.nn.functional.cosine_similarity(target.exp(), draft.exp(), dim=-1)
        case _:
            raise ValueError(f"unknown measure {measure!r}")
    return found.clamp(0, 1)


def _kl(log_probs: Tensor, others: Tensor) -> Tensor:
    """KL(first || second) in nats, [...]; infinite where the second excludes what the first may say."""
    probs = log_probs.exp()
    # Where the first is 0 the term is 0, whatever the second is: -inf - -inf must not make it nan.
    return torch.where(probs > 0, probs * (log_probs - others), 0.0).sum(-1)
