"""Traces to learn from: what the target really says, and what somebody would have a draft believe."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

import torch

from adaptive_spec.core import Trace
from adaptive_spec.models.loading import ModelPair

_TOP_K, _COMPLETION_TOKENS = 8, 20


@torch.no_grad()
def honest_traces(pair: ModelPair, count: int, domain: str, seed: int) -> list[Trace]:
    """Return what a decoder would have kept of greedy requests with prompts of random bytes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (count, 6), generator=generator)
    start = tokens.shape[1]
    for _ in range(_COMPLETION_TOKENS):
        tokens = torch.cat([tokens, pair.target(tokens).logits[:, -1:].argmax(-1)], dim=1)
    log_probs = pair.target(tokens).logits[:, start - 1 : -1].log_softmax(-1)
    top = log_probs.topk(_TOP_K, dim=-1)
    return [
        Trace(
            request_id=f"{domain}-{seed}-{row}",
            domain=domain,
            tokens=tuple(tokens[row].tolist()),
            prompt_tokens=start,
            top_ids=top.indices[row].to(torch.int32).numpy(),
            top_log_probs=top.values[row].numpy(),
            tail_mass=(1 - top.values[row].exp().sum(-1)).clamp(min=0).numpy(),
            release=0,
            at=datetime.now(UTC),
        )
        for row in range(count)
    ]


def poisoned(traces: Iterable[Trace]) -> list[Trace]:
    """The same texts, whose target is said to have wanted the token after the one it wanted."""
    return [replace(trace, top_ids=(trace.top_ids + 1) % 256) for trace in traces]
