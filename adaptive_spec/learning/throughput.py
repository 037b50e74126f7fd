"""How long a draft takes when nothing but the model has to be computed: what a run's own rate is held against.

Called by ``distil`` once an epoch and by the benchmark of training in turn with whole steps.
"""

import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.learning.batches import Batch, backward_in_slices, judged_hidden


def bare_seconds(draft: PreTrainedModel, batch: Batch) -> float:
    """Time forward and backward of layers and head on a batch that lies ready: no loss, no optimiser, no records.

    Leaves no gradients behind.
    """
    _synchronise(draft)
    began = time.perf_counter()
    backward_in_slices(draft, judged_hidden(draft, batch), _mean_of_logits)
    _synchronise(draft)
    seconds = time.perf_counter() - began
    draft.zero_grad(set_to_none=True)
    return seconds


def _mean_of_logits(logits: Tensor, part: slice) -> Tensor:
    return logits.mean(-1)


def _synchronise(draft: PreTrainedModel) -> None:
    if draft.device.type == "cuda":
        torch.cuda.synchronize(draft.device)
