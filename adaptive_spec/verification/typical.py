"""Rules that look at the target's distribution and the token alone, not at the draft's.  Relaxed."""

from torch import Tensor


def typical_passes(target_log_probs: Tensor, chain: Tensor, epsilon: float, delta: float) -> Tensor:
    """Typical acceptance: target(token) > min(epsilon, delta exp(-H(target))).

    Medusa, arXiv 2401.10774, section 2.3.1.  Where the target is unsure many tokens are typical, where it is sure few.

    Args:
        target_log_probs: [rows, chain, vocab]; chain: [rows, chain].

    Returns:
        [rows, chain] bool.
    """
    probs = target_log_probs.exp()
    entropy = -probs.mul_(target_log_probs).nansum(-1)  # 0 x -inf, a token that cannot be, does not count
    of_token = target_log_probs.gather(-1, chain[..., None]).squeeze(-1).exp()
    return of_token > (delta * (-entropy).exp()).clamp_max(epsilon)


def topk_passes(target_log_probs: Tensor, chain: Tensor, top_k: int, delta: float) -> Tensor:
    """Relaxed acceptance: the token is among the target's ``top_k`` and at most ``delta`` less probable than its best.

    TensorRT-LLM's relaxed acceptance for reasoning models.  Of equally probable tokens all rank alike.

    Args:
        target_log_probs: [rows, chain, vocab]; chain: [rows, chain].

    Returns:
        [rows, chain] bool.
    """
    of_token = target_log_probs.gather(-1, chain[..., None])
    better = (target_log_probs > of_token).sum(-1)
    best = target_log_probs.amax(-1).exp()
    return (better < top_k) & (of_token.squeeze(-1).exp() >= best - delta)
