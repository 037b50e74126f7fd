"""Score a draft on recorded traces, without the target: its distributions are in the traces.

Called by the pipeline before the gate, and by ``distil`` after each epoch.  Changes nothing in the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.core import Trace
from adaptive_spec.learning.batches import HEAD_ROWS, Batch, head_logits, judged_hidden, make_batch, plan
from adaptive_spec.learning.losses import bucketed_log_probs, overlap
from adaptive_spec.releases.gate import TraceScore, paired_gain

__all__ = ["TraceScore", "acceptance_length", "paired_gain", "score"]


@dataclass(frozen=True, slots=True)
class _Judged:
    agrees: Tensor  # [tokens] bool
    overlap: Tensor  # [tokens]


def score(
    draft: PreTrainedModel | PeftModel, traces: Sequence[Trace], chain_length: int = 4, batch_tokens: int = 2048
) -> list[TraceScore]:
    """Score every trace with a completion, in the order given.

    Args:
        draft: the model, adapters merged or injected.
        chain_length: tokens proposed per step in the replay behind ``acceptance_length``.
        batch_tokens: padded tokens per forward.
    """
    if isinstance(draft, PeftModel):
        draft = draft.get_base_model()
    training = draft.training
    draft.eval()
    scores: dict[int, TraceScore] = {}
    for group in plan(traces, batch_tokens):
        batch = make_batch(group, draft.device)
        judged = _judge(draft, batch)
        parts = zip(group, judged.agrees.split(batch.lengths), judged.overlap.split(batch.lengths), strict=True)
        for trace, agrees, shared in parts:
            scores[id(trace)] = TraceScore(
                trace.domain,
                trace.request_id,
                agrees.float().mean().item(),
                shared.mean().item(),
                acceptance_length(agrees.tolist(), chain_length),
            )
    draft.train(training)
    return [scores[id(trace)] for trace in traces if id(trace) in scores]


def acceptance_length(agrees: Sequence[bool], chain_length: int) -> float:
    """Return the emitted tokens per step of a greedy replay.

    Each step accepts the run of agreements up to ``chain_length`` and emits one token more; the last step emits what
    is left.  Teacher-forced: a draft is judged on the text that was served.
    """
    position = num_steps = 0
    while position < len(agrees):
        accepted = 0
        while accepted < chain_length and position + accepted < len(agrees) and agrees[position + accepted]:
            accepted += 1
        position += accepted + 1
        num_steps += 1
    return len(agrees) / num_steps if num_steps else 0.0


@torch.inference_mode()
def _judge(draft: PreTrainedModel, batch: Batch) -> _Judged:
    hidden = judged_hidden(draft, batch)
    argmax = batch.target_argmax
    agrees, shared = [], []
    for start in range(0, len(hidden), HEAD_ROWS):
        part = slice(start, start + HEAD_ROWS)
        logits = head_logits(draft, hidden[part])
        agrees.append(logits.argmax(-1) == argmax[part])
        shared.append(overlap(batch.target_log_probs[part], bucketed_log_probs(logits, batch.top_ids[part])))
    return _Judged(torch.cat(agrees).cpu(), torch.cat(shared).cpu())
