"""Which tokens of a batch count how much.  Pure: tensors in, tensors out.

Every weight is read off the draft as it is now, and none carries a gradient.  Called by ``distil``; the defaults of
``learning.*`` leave all tokens alike, and then nothing here runs.
"""

import torch
from torch import Tensor

from adaptive_spec.settings import LearningSettings


def is_even(settings: LearningSettings) -> bool:
    """Whether all tokens count alike."""
    return settings.survival_tokens <= 1 and settings.error_weight == 1 and settings.skip_confidence >= 1


def token_weights(
    settings: LearningSettings, accepted: Tensor, agrees: Tensor, confidence: Tensor, places: Tensor
) -> Tensor:
    """Return what each token's loss is multiplied with.

    Args:
        accepted: probability that verification accepts the draft's token, the overlap.
        agrees: whether the draft's most probable token is the target's.
        confidence: the draft's probability of the target's most probable token.
        places: of the tokens in their traces, 0 first.  All [tokens].

    Returns:
        [tokens], at least 0.
    """
    weights = survival_weights(accepted, places, settings.survival_tokens)
    weights = torch.where(agrees, weights, weights * settings.error_weight)
    return weights.masked_fill(agrees & (confidence > settings.skip_confidence), 0.0)


def survival_weights(accepted: Tensor, places: Tensor, chain_length: int) -> Tensor:
    """Weigh tokens by how many would-be chains reach them, a chain being begun at every token alike.

    A chain of up to L tokens reaches its token d + 1 when the d before it were accepted, so token t weighs

        w(t) = sum over d < L of accepted(t - 1) * ... * accepted(t - d),

    within its trace: 1 behind a sure rejection, L after L - 1 sure acceptances.  Early places of a chain always count,
    later ones as far as they are expected to be reached.  Scaled to a mean of one.

    Args:
        accepted: acceptance probabilities.  [tokens]
        places: of the tokens in their traces, 0 first.  [tokens]
        chain_length: L; 0 and 1 weigh all tokens alike.

    Returns:
        [tokens]
    """
    reached = torch.ones_like(accepted)
    weights = reached.clone()
    for _ in range(1, min(chain_length, len(accepted))):
        before = torch.cat([accepted.new_zeros(1), (reached * accepted)[:-1]])
        reached = before.masked_fill(places == 0, 0.0)
        weights = weights + reached
    return weights / weights.mean()
