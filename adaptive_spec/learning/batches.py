"""Batches of traces: which tokens go in, which positions are judged, and what the target said there.

Called by ``distil`` and ``evaluate``.  A trace's row i is the target's distribution of token ``prompt_tokens + i``,
which the draft predicts at position ``prompt_tokens + i - 1``.  Prompt positions carry no target and no loss.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.core import Trace
from adaptive_spec.learning.losses import with_tail
from adaptive_spec.learning.teacher import Teacher

HEAD_ROWS = 256  # rows of [rows, vocab] logits that exist at once


@dataclass(frozen=True, slots=True)
class Batch:
    """Traces side by side, padded on the right.

    input_ids, attention_mask: [traces, length]; judged: [traces, length] bool, where the draft predicts a completion
    token; top_ids: [tokens, top_k]; target_log_probs: [tokens, top_k + 1], tail last; argmax_column: [tokens], the
    column of the target's most probable token; lengths: judged tokens per trace.
    """

    input_ids: Tensor
    attention_mask: Tensor
    judged: Tensor
    top_ids: Tensor
    target_log_probs: Tensor
    argmax_column: Tensor
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def places(self) -> Tensor:
        """The place of each judged token in its completion, 0 first.  -> [tokens]"""
        return torch.cat([torch.arange(length, device=self.top_ids.device) for length in self.lengths])

    @property
    def target_argmax(self) -> Tensor:
        """The target's most probable token.  -> [tokens]"""
        return self.top_ids.gather(-1, self.argmax_column.unsqueeze(-1)).squeeze(-1)


def completion_length(trace: Trace) -> int:
    """Return the number of completion tokens that can be judged; an empty prompt leaves the first without a context."""
    return len(trace.tokens) - max(trace.prompt_tokens, 1)


def make_batch(traces: Sequence[Trace], device: torch.device, teacher: Teacher | None = None) -> Batch:
    """Pad ``traces`` to one batch on ``device``; a teacher's distributions replace those that were recorded."""
    width = max(len(trace.tokens) for trace in traces)
    input_ids = torch.zeros(len(traces), width, dtype=torch.long)
    attention_mask, judged = torch.zeros_like(input_ids), torch.zeros_like(input_ids, dtype=torch.bool)
    for row, trace in enumerate(traces):
        length = len(trace.tokens)
        input_ids[row, :length] = torch.tensor(trace.tokens)
        attention_mask[row, :length] = 1
        judged[row, length - completion_length(trace) - 1 : length - 1] = True
    input_ids, attention_mask, judged = input_ids.to(device), attention_mask.to(device), judged.to(device)
    if teacher is not None:
        top_ids, log_probs = teacher.targets(input_ids, attention_mask, judged)
    else:
        top_k = min(trace.top_ids.shape[1] for trace in traces)
        targets = [_target(trace, top_k) for trace in traces]
        top_ids, log_probs = torch.cat([ids for ids, _ in targets]), torch.cat([values for _, values in targets])
    return Batch(
        input_ids,
        attention_mask,
        judged,
        top_ids.to(device),
        log_probs.to(device),
        log_probs[:, :-1].argmax(-1).to(device),
        [completion_length(trace) for trace in traces],
    )


def plan(traces: Sequence[Trace], batch_tokens: int, seed: int | None = None) -> list[list[Trace]]:
    """Group traces of like length into batches of at most ``batch_tokens`` padded tokens, or one longer trace.

    With a seed, groups and their order are shuffled; without, the order is by length.
    """
    generator = random.Random(seed)
    order = [trace for trace in traces if completion_length(trace) > 0]
    if seed is not None:
        generator.shuffle(order)
    order.sort(key=lambda trace: len(trace.tokens) // 32 if seed is not None else len(trace.tokens))
    groups: list[list[Trace]] = []
    width = 0
    for trace in order:
        width = max(width, len(trace.tokens))
        if not groups or (len(groups[-1]) + 1) * width > batch_tokens:
            groups.append([])
            width = len(trace.tokens)
        groups[-1].append(trace)
    if seed is not None:
        generator.shuffle(groups)
    return groups


def judged_hidden(draft: PreTrainedModel, batch: Batch) -> Tensor:
    """Run the draft up to its head.  -> [tokens, hidden]"""
    with torch.autocast(draft.device.type, torch.bfloat16, enabled=draft.device.type == "cuda"):
        output = draft.base_model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    hidden: Tensor = output.last_hidden_state[batch.judged]
    return hidden


def head_logits(draft: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Apply the head to a slice.  [rows, hidden] -> [rows, vocab]"""
    head = draft.get_output_embeddings()
    assert head is not None
    with torch.autocast(draft.device.type, torch.bfloat16, enabled=draft.device.type == "cuda"):
        logits: Tensor = head(hidden)
    return logits


def backward_in_slices(
    draft: PreTrainedModel,
    hidden: Tensor,
    loss_of_slice: Callable[[Tensor, slice], Tensor],
    num_tokens: int | None = None,
) -> float:
    """Accumulate the gradients of a mean over tokens and return the sum here over ``num_tokens``.

    The head runs over ``HEAD_ROWS`` tokens at a time, so that [tokens, vocab] never exists at once.

    Args:
        hidden: [tokens, hidden], still attached to the layers that made it.
        loss_of_slice: logits [rows, vocab] and which tokens they belong to -> losses [rows].
        num_tokens: that the mean is over, with those of other batches; None: these.
    """
    leaf = hidden.detach().requires_grad_(True)
    total = leaf.new_zeros((), dtype=torch.float32)
    for start in range(0, len(leaf), HEAD_ROWS):
        part = slice(start, start + HEAD_ROWS)
        mean = loss_of_slice(head_logits(draft, leaf[part]), part).sum() / (num_tokens or len(leaf))
        mean.backward()
        total += mean.detach()
    hidden.backward(leaf.grad)
    return total.item()


def _target(trace: Trace, top_k: int) -> tuple[Tensor, Tensor]:
    """Token ids [tokens, top_k] and log-probs [tokens, top_k + 1]; what ``top_k`` cuts off goes to the tail."""
    rows = slice(len(trace.top_ids) - completion_length(trace), None)
    values = np.asarray(trace.top_log_probs[rows], dtype=np.float32)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :top_k]
    ids = np.take_along_axis(np.asarray(trace.top_ids[rows], dtype=np.int64), order, -1)
    log_probs = torch.from_numpy(np.take_along_axis(values, order, -1))
    cut = torch.from_numpy(values).exp().sum(-1) - log_probs.exp().sum(-1)
    tail = torch.from_numpy(np.asarray(trace.tail_mass[rows], dtype=np.float32)) + cut.clamp_min(0)
    return torch.from_numpy(ids), with_tail(log_probs, tail)
