"""Processed distributions: what penalties, sampling temperature, min-p, top-k and top-p make of logits.

Draft and target go through the same function, and what is verified against is what was sampled from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptive_spec.core import SamplingParams
from adaptive_spec.verification.transfer import on_device

_USUAL_FLOOR = 1e-4  # tokens at least as probable nearly always hold the mass that top-p asks for
_BLOCK = 1 << 18  # numbers that stay in a processor's cache
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
    some_warm: bool  # at another temperature than 1
    truncates: bool  # some row by top-k or top-p
    drops: bool  # some row by min-p

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> "Processing":
        """Collect it from the rows' parameters."""
        return cls(
            temperature=on_device([1.0 if p.greedy else p.temperature for p in params], device),
            top_k=on_device([min(p.top_k, _ANY_TOP_K) for p in params], device),
            top_p=on_device([p.top_p for p in params], device),
            min_p=on_device([p.min_p for p in params], device),
            greedy=on_device([p.greedy for p in params], device),
            some_greedy=any(p.greedy for p in params),
            some_warm=any(not p.greedy and p.temperature != 1 for p in params),
            truncates=any(p.top_k > 0 or p.top_p < 1 for p in params),
            drops=any(p.min_p > 0 for p in params),
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
    if processing.some_warm:
        logits = logits / processing.temperature[:, None, None]
    probs = logits.softmax(-1)
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
    """On a CPU, where sorting a whole vocabulary takes a third of a decoding step, only what may be kept is sorted."""
    if probs.device.type == "cpu":
        return _truncated_on_host(probs, processing)
    return _truncated_by_sorting(probs, processing)


def _truncated_by_sorting(probs: Tensor, processing: Processing) -> Tensor:
    top_k, top_p = processing.top_k[:, None, None], processing.top_p[:, None, None]
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)  # of equal ones the lowest id first
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


def _truncated_on_host(probs: Tensor, processing: Processing) -> Tensor:
    truncated = probs.clone()
    limits = zip(processing.top_k.tolist(), processing.top_p.tolist(), strict=True)
    for row, (top_k, top_p) in zip(truncated.numpy(), limits, strict=True):
        for values in row if top_k > 0 or top_p < 1 else ():
            ids, kept = _largest(values, top_k, top_p)
            values[:] = 0
            values[ids] = kept
    return truncated


def _largest(probs: NDArray[np.float32], top_k: int, top_p: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that top-k, then top-p keep of one distribution, and their probabilities, normalised again."""
    total = float(probs.sum(dtype=np.float64))
    for least in _floors(probs, top_k, top_p):
        ids = np.flatnonzero(probs >= least)
        enough = len(ids) >= top_k if top_k > 0 else float(probs[ids].sum(dtype=np.float64)) >= top_p * total
        if enough:
            break
    ids = ids[np.argsort(-probs[ids], kind="stable")]  # of equal ones the lowest id first
    if top_k > 0:
        ids = ids[:top_k]
    values = probs[ids].astype(np.float64)
    if top_p < 1:
        before = (values.cumsum() - values) / (values.sum() if top_k > 0 else total)
        values = values[: max(1, int(np.count_nonzero(before < top_p)))]
    return ids[: len(values)], values / values.sum()


def _floors(probs: NDArray[np.float32], top_k: int, top_p: float) -> tuple[float, ...]:
    """Probabilities below which nothing may be kept, if enough lies above; the last one is always right."""
    size = len(probs)
    if top_k > 0:
        return (float(np.partition(probs, size - top_k)[size - top_k]) if top_k < size else 0.0,)
    # What is less probable than (1 - top_p) / size sums to less than 1 - top_p.
    return (_USUAL_FLOOR, (1 - top_p) / size / 2, 0.0)


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
    if probs.device.type != "cpu" or not uniforms.numel():
        return _drawn(probs, uniforms)
    rows, drawn = probs.reshape(-1, probs.shape[-1]), uniforms.reshape(-1)
    size = max(1, _BLOCK // probs.shape[-1])
    parts = [_drawn(some, its) for some, its in zip(rows.split(size), drawn.split(size), strict=True)]
    return torch.cat(parts).view(uniforms.shape)


def _drawn(probs: Tensor, uniforms: Tensor) -> Tensor:
    cumulative = probs.double().cumsum(-1)
    total = cumulative[..., -1:]
    drawn = torch.searchsorted(cumulative, uniforms.double().unsqueeze(-1) * total, right=True).squeeze(-1)
    # u * total can round up to total itself; the last token with mass is then the one meant.
    if probs.device.type == "cpu" and drawn.numel() and int(drawn.max()) < probs.shape[-1]:
        return drawn
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
