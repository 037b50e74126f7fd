"""How fast a draft trains when nothing but the model has to be computed: what a run's own rate is held against."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.core import Trace
from adaptive_spec.learning.batches import Batch, backward_in_slices, judged_hidden, make_batch

_BATCHES = 3


def bare_tokens_per_second(draft: PreTrainedModel, groups: Sequence[Sequence[Trace]]) -> float:
    """Time forward and backward of layers and head on a few batches that lie ready: no loss, no optimiser, no records.

    Leaves no gradients behind.

    Returns completion tokens per second of the batches after the first, which warms up; of it where it is the only one.
    """
    batches = [make_batch(traces, draft.device) for traces in groups[: 1 + _BATCHES]]
    _pass(draft, batches[0])
    timed = batches[1:] or batches
    began = time.monotonic()
    for batch in timed:
        _pass(draft, batch)
    seconds = time.monotonic() - began
    draft.zero_grad(set_to_none=True)
    return sum(batch.num_tokens for batch in timed) / max(seconds, 1e-9)


def _pass(draft: PreTrainedModel, batch: Batch) -> None:
    def mean_of_logits(logits: Tensor, part: slice) -> Tensor:
        return logits.mean(-1)

    backward_in_slices(draft, judged_hidden(draft, batch), mean_of_logits)
    if draft.device.type == "cuda":
        torch.cuda.synchronize(draft.device)
