"""Processed distributions: what penalties, sampling temperature, min-p, top-k and top-p make of logits.

Draft and target go through the same function, and what is verified against is what was sampled from.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def penalised_logits(
    logits: Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    repetition_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
) -> Tensor:
    """Return the logits of one position after the penalties.

    Args:
        logits: [vocab].
        prompt, output: the tokens before the position.
        repetition_penalty: over both; positive logits are divided by it, others multiplied (Keskar et al. 2019).
        presence_penalty, frequency_penalty: over the output, as OpenAI's API defines them.

    Returns:
        [vocab] float32.
    """
    logits = logits.float().clone()
    if repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *output}), dtype=torch.long, device=logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / repetition_penalty, values * repetition_penalty)
    if output and (presence_penalty or frequency_penalty):
        emitted = torch.tensor(output, dtype=torch.long, device=logits.device)
        tokens, counts = emitted.unique(return_counts=True)
        logits[tokens] -= presence_penalty + frequency_penalty * counts
    return logits


def processed_probs(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None = None
) -> Tensor:
    """Return the distribution that a request samples from.

    Args:
        logits: [rows, positions, vocab].
        temperature: [rows]; 0 is greedy and gives a one-hot distribution on the largest logit.
        top_k: [rows]; 0 keeps every token.
        top_p: [rows]; 1 keeps every token, else the smallest set of mass >= top_p, after top-k.
        min_p: [rows]; drops tokens less probable than min_p times the most probable one, before top-k.

    Returns:
        [rows, positions, vocab] float32, each a distribution.
    """
    logits = logits.float()
    greedy = temperature <= 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None, None]
    probs = scaled.softmax(-1)
    if min_p is not None and bool((min_p > 0).any()):
        probs = probs * (probs >= min_p[:, None, None] * probs.amax(-1, keepdim=True))
        probs = probs / probs.sum(-1, keepdim=True)
    probs = _truncated(probs, top_k, top_p)
    if bool(greedy.any()):
        one_hot = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(greedy[:, None, None], one_hot, probs)
    return probs


def _truncated(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    limited = (top_k > 0) | (top_p < 1)
    if not bool(limited.any()):
        return probs
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    kept = (ranks < top_k[:, None, None]) | (top_k <= 0)[:, None, None]
    ordered = ordered * kept
    total = ordered.sum(-1, keepdim=True)
    before = (ordered.cumsum(-1) - ordered) / total
    kept = kept & ((before < top_p[:, None, None]) | (top_p >= 1)[:, None, None])
    ordered = ordered * kept
    ordered = ordered / ordered.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, order, ordered)


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw by inverse CDF, one uniform in [0, 1) a row: the draw depends on nothing but its own row.

    Args:
        probs: [..., vocab], non-negative, not necessarily normalised.
        uniforms: [...].

    Returns:
        [...] token ids; never a token of probability 0.
    """
    cumulative = probs.double().cumsum(-1)
    total = cumulative[..., -1:]
    drawn = torch.searchsorted(cumulative, uniforms.double().unsqueeze(-1) * total, right=True).squeeze(-1)
    # u * total can round up to total itself; the last token with mass is then the one meant.
    last = (probs > 0).int().cumsum(-1).argmax(-1)
    return torch.minimum(drawn, last)


def sparse_log_probs(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a trace keeps of a distribution: its most probable tokens and the mass of the rest.

    Args:
        logits: [positions, vocab], raw.

    Returns:
        Token ids [positions, top_k], their log-probs [positions, top_k] float32, tail mass [positions].
    """
    logits = logits.float()
    top = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    log_probs = top.values - logits.logsumexp(-1, keepdim=True)
    return top.indices, log_probs, (1 - log_probs.exp().sum(-1)).clamp_min(0)


def log_probs_of(logits: Tensor, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probs of given tokens, and the most probable tokens with theirs.

    Args:
        logits: [positions, vocab], raw.
        tokens: [positions].

    Returns:
        Log-probs [positions] float32, token ids [positions, top_k], their log-probs [positions, top_k] float32.
    """
    log_probs = logits.float().log_softmax(-1)
    top = log_probs.topk(top_k, dim=-1)
    return log_probs.gather(-1, tokens[:, None]).squeeze(-1), top.indices, top.values
