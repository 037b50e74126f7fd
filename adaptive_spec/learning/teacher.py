"""The target's distributions computed anew, for offline corpora: whole, or of more tokens than were recorded.

Live runs never need it, since verification has paid for what traces keep.  Called by ``batches`` where ``distil`` was
given a teacher.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adaptive_spec.learning.losses import with_tail


class Teacher:
    """A target that says what it would have said at temperature 1.

    Args:
        target: shares the tokenizer of the draft.
        top_k: tokens to keep; None: the whole vocabulary, which leaves a tail of nothing.
    """

    def __init__(self, target: PreTrainedModel, top_k: int | None = None) -> None:
        self.target, self.top_k = target, top_k

    @torch.no_grad()  # inference tensors could not be saved for the draft's backward
    def targets(self, input_ids: Tensor, attention_mask: Tensor, judged: Tensor) -> tuple[Tensor, Tensor]:
        """Run the target over padded traces.

        Args:
            input_ids, attention_mask: [traces, length]; judged: [traces, length] bool, the positions that are wanted.

        Returns:
            Token ids [tokens, top_k] and log-probs [tokens, top_k + 1] in float32, the tail last.
        """
        model = self.target
        hidden = model.base_model(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state[judged]
        head = model.get_output_embeddings()
        assert head is not None
        log_probs = head(hidden).float().log_softmax(-1)
        if self.top_k is None:
            ids = torch.arange(log_probs.shape[-1], device=log_probs.device).expand_as(log_probs)
            return ids, with_tail(log_probs, log_probs.new_zeros(len(log_probs)))
        values, ids = log_probs.topk(min(self.top_k, log_probs.shape[-1]))
        return ids, with_tail(values, 1 - values.exp().sum(-1))
