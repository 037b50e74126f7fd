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
            found = 1 - _js(target, draft) / math.log(2)
        case "tv":
            found = torch.minimum(target, draft).exp_().sum(-1)
        case "cosine":
            found = _cosine(target.exp(), draft.exp())
        case _:
            raise ValueError(f"unknown measure {measure!r}")
    return found.clamp(0, 1)


def _kl(log_probs: Tensor, others: Tensor) -> Tensor:
    """KL(first || second) in nats, [...]; infinite where the second excludes what the first may say."""
    # Where the first is 0 the term is 0, whatever the second is: 0 x inf, and -inf - -inf, are nan and do not count.
    return log_probs.exp().mul_(log_probs - others).nansum(-1)


def _js(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats, [...]."""
    first_probs, second_probs = first.exp(), second.exp()
    middle = (first_probs + second_probs).div_(2).log_()
    of_first = first_probs.mul_(first - middle).nansum(-1)
    return (of_first + second_probs.mul_(middle.neg_().add_(second)).nansum(-1)) / 2


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    lengths = torch.linalg.vector_norm(first, dim=-1) * torch.linalg.vector_norm(second, dim=-1)
    return first.mul_(second).sum(-1) / lengths
