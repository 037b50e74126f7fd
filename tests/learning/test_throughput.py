"""The bare rate is one of real passes, and leaves the model as it was."""

import torch

from adaptive_spec.learning.batches import plan
from adaptive_spec.learning.throughput import bare_tokens_per_second
from tests.learning.toy import tiny_draft, toy_traces


def test_nothing_is_left_behind() -> None:
    draft = tiny_draft()
    pristine = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    groups = plan(toy_traces(60, seed=1), 512, seed=0)
    assert bare_tokens_per_second(draft, groups) > 0
    assert bare_tokens_per_second(draft, groups[:1]) > 0
    assert all(parameter.grad is None for parameter in draft.parameters())
    assert all(torch.equal(tensor, pristine[name]) for name, tensor in draft.state_dict().items())
