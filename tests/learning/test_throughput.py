"""The bare pass is one of real passes, and leaves the model as it was."""

import torch

from adaptive_spec.learning.batches import make_batch
from adaptive_spec.learning.throughput import bare_seconds
from tests.learning.toy import tiny_draft, toy_traces


def test_nothing_is_left_behind_and_more_tokens_take_longer() -> None:
    draft = tiny_draft()
    pristine = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    few, many = (make_batch(toy_traces(count, seed=1), draft.device) for count in (2, 400))
    bare_seconds(draft, few)  # warms up
    assert 0 < min(bare_seconds(draft, few) for _ in range(3)) < min(bare_seconds(draft, many) for _ in range(3))
    assert all(parameter.grad is None for parameter in draft.parameters())
    assert all(torch.equal(tensor, pristine[name]) for name, tensor in draft.state_dict().items())
