"""Processed distributions: what penalties, sampling temperature, min-p, top-k and top-p make of logits.

Draft and target go through the same function, and what is verified against is what was sampled from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from adaptive_spec.core import SamplingParams
from adaptive_spec.verification.transfer import on_device

_NUCLEUS = 1024  # tokens that nearly always hold the mass that top-p asks for
_ANY_TOP_K = 1 << 30


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


@dataclass(frozen=True, slots=True)
class Processing:
    """How a batch of requests makes distributions of logits.

    Whether any row truncates is known on the host, so that deciding it never waits for a device.

    temperature, top_k, top_p, min_p: [rows].  temperature 0 is greedy and gives a one-hot distribution on the largest
    logit; top_k 0 and top_p 1 keep every token; min_p drops tokens less probable than min_p times the most probable.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: Tensor
    some_greedy: bool
    truncates: bool  # some row by top-k or top-p
    drops: bool  # some row by min-p
    most_kept: int  # no row keeps more tokens; 0: not known

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> "Processing":
        """Collect it from the rows' parameters."""
        limits = [p.top_k for p in params]
        return cls(
            temperature=on_device([1.0 if p.greedy else p.temperature for p in params], device),
            top_k=on_device([min(limit, _ANY_TOP_K) for limit in limits], device),
            top_p=on_device([p.top_p for p in params], device),
            min_p=on_device([p.min_p for p in params], device),
            greedy=on_device([p.greedy for p in params], device),
            some_greedy=any(p.greedy for p in params),
            truncates=any(p.top_k > 0 or p.top_p < 1 for p in params),
            drops=any(p.min_p > 0 for p in params),
            most_kept=max(limits) if min(limits) > 0 else 0,
        )

    def rows(self, index: Tensor) -> "Processing":
        """The same for some of the rows."""
        columns = {name: getattr(self, name)[index] for name in ("temperature", "top_k", "top_p", "min_p", "greedy")}
        return replace(self, **columns)


def processed_probs(logits: Tensor, processing: Processing) -> Tensor:
    """Return the distributions that requests sample from: temperature, min-p, top-k, then top-p.

    Args:
        logits: [rows, positions, vocab].

    Returns:
        [rows, positions, vocab] float32, each a distribution.
    """
    logits = logits.float()
    probs = (logits / processing.temperature[:, None, None]).softmax(-1)
    if processing.drops:
        probs = probs * (probs >= processing.min_p[:, None, None] * probs.amax(-1, keepdim=True))
        probs = probs / probs.sum(-1, keepdim=True)
    if processing.truncates:
        probs = _truncated(probs, processing)
    if processing.some_greedy:
        one_hot = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(processing.greedy[:, None, None], one_hot, probs)
    return probs


def _truncated(probs: Tensor, processing: Processing) -> Tensor:
    top_k, top_p = processing.top_k[:, None, None], processing.top_p[:, None, None]
    ordered, order = _largest(probs, processing)
    ranks = torch.arange(ordered.shape[-1], device=probs.device)
    limited = top_k > 0
    kept = (ranks < top_k) | ~limited
    ordered = ordered * kept
    total = torch.where(limited, ordered.sum(-1, keepdim=True), probs.sum(-1, keepdim=True))
    before = (ordered.cumsum(-1) - ordered) / total
    kept = (before < top_p) | (top_p >= 1) | (ranks == 0)
    ordered = ordered * kept
    ordered = ordered / ordered.sum(-1, keepdim=True)
    truncated = torch.zeros_like(probs).scatter_(-1, order, ordered)
    return torch.where(limited | (top_p < 1), truncated, probs)


def _largest(probs: Tensor, processing: Processing) -> tuple[Tensor, Tensor]:
    """The largest probabilities in descending order, of equal ones the lowest id first, and whose they are.

    As many as any row may keep.  On a CPU, where sorting a whole vocabulary takes a third of a decoding step, the rest
    is left out wherever that changes nothing.
    """
    count = processing.most_kept or _NUCLEUS
    if probs.device.type != "cpu" or count >= probs.shape[-1]:
        return probs.sort(dim=-1, descending=True, stable=True)
    values, order = probs.topk(count, dim=-1)
    least = values[..., -1:]
    top_k, top_p = processing.top_k[:, None], processing.top_p[:, None]
    holds = torch.where(top_k > 0, top_k <= count, (values.sum(-1) >= top_p) | (top_p >= 1))
    alone = (least == 0).squeeze(-1) | ((probs >= least).sum(-1) == count)  # no tie was cut in two
    if not bool((holds & alone).all()):
        return probs.sort(dim=-1, descending=True, stable=True)
    order = order.sort(dim=-1).values
    values, within = probs.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, order.gather(-1, within)


def best_tokens(logits: Tensor) -> Tensor:
    """The most probable tokens, of equal ones the lowest id: [..., vocab] -> [...].

    On a CPU numpy's argmax takes a tenth of the time of torch's.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.argmax(-1)
    return torch.from_numpy(np.asarray(logits.detach().numpy().argmax(-1)))


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
