"""Score a draft on recorded traces, without the target: its distributions are in the traces.

Called by the pipeline before the gate, and by ``distil`` after each epoch.  Changes nothing in the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.core import Trace
from adaptive_spec.learning.batches import HEAD_ROWS, completion_length, head_logits, judged_hidden, make_batch, plan
from adaptive_spec.learning.losses import bucketed_log_probs, overlap
from adaptive_spec.records.screening import is_degenerate
from adaptive_spec.releases.paired import TraceScore, paired_gain

__all__ = ["JudgedTrace", "TraceScore", "acceptance_length", "judge", "paired_gain", "replay", "score", "score_of"]


@dataclass(frozen=True, slots=True)
class JudgedTrace:
    """What a draft says of one trace, per judged token.

    agrees: its most probable token is the target's.  overlap: sum of min(target, draft).  confidence: its largest
    probability.  All [tokens].  overlap_at: the same overlap on the target's top tokens alone, with the draft's logits
    divided by each of the temperatures that were asked for: [tokens, temperatures].
    """

    trace: Trace
    agrees: list[bool]
    overlap: Tensor
    confidence: list[float]
    overlap_at: Tensor


def score(
    draft: PreTrainedModel | PeftModel,
    traces: Sequence[Trace],
    chain_length: int = 4,
    batch_tokens: int = 2048,
    vocabulary: Sequence[int] | None = None,
) -> list[TraceScore]:
    """Score every trace with a completion, in the order given.

    Args:
        draft: the model, adapters merged or injected.
        chain_length: tokens proposed per step in the replay behind ``acceptance_length``.
        batch_tokens: padded tokens per forward.
        vocabulary: the only tokens that the draft proposes; None: all.
    """
    return [score_of(judged, chain_length) for judged in judge(draft, traces, batch_tokens, vocabulary)]


def means_over_tokens(draft: PreTrainedModel | PeftModel, traces: Sequence[Trace]) -> dict[str, float]:
    """Return ``agreement`` and ``overlap``, means over completion tokens, and ``acceptance_length``, that over steps.

    Every trace needs a completion token at least.
    """
    scores = score(draft, traces)
    lengths = [completion_length(trace) for trace in traces]
    means = {
        name: sum(getattr(row, name) * n for row, n in zip(scores, lengths, strict=True)) / sum(lengths)
        for name in ("agreement", "overlap")
    }
    num_steps = sum(n / row.acceptance_length for row, n in zip(scores, lengths, strict=True))
    return {**means, "acceptance_length": sum(lengths) / num_steps}


def score_of(judged: JudgedTrace, chain_length: int = 4) -> TraceScore:
    """Sum up one judged trace."""
    return TraceScore(
        judged.trace.domain,
        judged.trace.request_id,
        torch.tensor(judged.agrees).float().mean().item(),
        judged.overlap.mean().item(),
        acceptance_length(judged.agrees, chain_length),
        tuple(judged.agrees),
        tuple(judged.confidence),
        is_degenerate(judged.trace.tokens[judged.trace.prompt_tokens :]),
    )


def judge(
    draft: PreTrainedModel | PeftModel,
    traces: Sequence[Trace],
    batch_tokens: int = 2048,
    vocabulary: Sequence[int] | None = None,
    heats: Sequence[float] = (),
) -> list[JudgedTrace]:
    """Run the draft over every trace with a completion, in the order given.  Arguments as of ``score``.

    heats: temperatures at which ``overlap_at`` is wanted.
    """
    if isinstance(draft, PeftModel):
        draft = draft.get_base_model()
    training = draft.training
    draft.eval()
    groups = plan(traces, batch_tokens)
    silenced = _silenced(draft, vocabulary)
    judged = {id(row.trace): row for group in groups for row in _judge(draft, group, silenced, heats)}
    draft.train(training)
    return [judged[id(trace)] for trace in traces if id(trace) in judged]


def replay(agrees: Sequence[bool], chain_length: int) -> Iterator[tuple[int, int]]:
    """Yield (first position, accepted tokens) of each step of a greedy decoder over recorded text.

    Each step accepts the run of agreements up to ``chain_length`` and emits one token more; the last step emits what
    is left.  Teacher-forced: a draft is judged on the text that was served.
    """
    position = 0
    while position < len(agrees):
        accepted = 0
        while accepted < chain_length and position + accepted < len(agrees) and agrees[position + accepted]:
            accepted += 1
        yield position, accepted
        position += accepted + 1


def acceptance_length(agrees: Sequence[bool], chain_length: int) -> float:
    """Return the emitted tokens per step of a greedy ``replay``."""
    num_steps = sum(1 for _ in replay(agrees, chain_length))
    return len(agrees) / num_steps if num_steps else 0.0


def _silenced(draft: PreTrainedModel, vocabulary: Sequence[int] | None) -> Tensor | None:
    """What to add to logits so that only the vocabulary is left.  [vocab]"""
    if vocabulary is None:
        return None
    outside = torch.full((draft.config.vocab_size,), -torch.inf, device=draft.device)
    return outside.index_fill(0, torch.tensor(vocabulary, device=draft.device), 0.0)


@torch.inference_mode()
def _judge(
    draft: PreTrainedModel, group: Sequence[Trace], silenced: Tensor | None, heats: Sequence[float]
) -> list[JudgedTrace]:
    batch = make_batch(group, draft.device)
    hidden = judged_hidden(draft, batch)
    argmax = batch.target_argmax
    agrees, shared, sure, heated = [], [], [], []
    for start in range(0, len(hidden), HEAD_ROWS):
        part = slice(start, start + HEAD_ROWS)
        logits = head_logits(draft, hidden[part])
        if silenced is not None:
            logits = logits + silenced
        agrees.append(logits.argmax(-1) == argmax[part])
        shared.append(overlap(batch.target_log_probs[part], bucketed_log_probs(logits, batch.top_ids[part])))
        sure.append((logits.amax(-1).float() - logits.float().logsumexp(-1)).exp())
        at = [_top_overlap(logits / heat, batch.top_ids[part], batch.target_log_probs[part]) for heat in heats]
        heated.append(torch.stack(at, -1) if at else logits.new_zeros(len(logits), 0))
    columns = (torch.cat(column).cpu().split(batch.lengths) for column in (agrees, shared, sure, heated))
    return [
        JudgedTrace(trace, same.tolist(), both, top.tolist(), at)
        for trace, same, both, top, at in zip(group, *columns, strict=True)
    ]


def _top_overlap(logits: Tensor, token_ids: Tensor, target_log_probs: Tensor) -> Tensor:
    """The overlap without the tail, which as one bucket would reward a draft for being vague.  [tokens]"""
    return overlap(target_log_probs[:, :-1], bucketed_log_probs(logits, token_ids)[:, :-1])
