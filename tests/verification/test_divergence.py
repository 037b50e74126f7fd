"""What relaxed verification gives up, by hand."""

import torch

from adaptive_spec.verification.divergence import diverging_tokens, given_up_nats, within_allowance
from adaptive_spec.verification.exact import kept


def test_what_the_strict_rule_accepts_costs_nothing_and_the_rest_is_limited() -> None:
    strict = torch.tensor([[1, 0, 1, 0, 1]] * 4).bool()
    passes = torch.tensor([[0, 1, 0, 1, 0]] * 3 + [[0, 0, 1, 1, 1]]).bool()
    accepted = within_allowance(strict, passes, torch.tensor([0, 1, 2, 9]))
    lengths = torch.tensor([5, 5, 5, 5])
    num_kept = kept(accepted, lengths)
    assert num_kept.tolist() == [1, 3, 5, 1]
    assert diverging_tokens(strict, num_kept).sum(-1).tolist() == [0, 1, 2, 0]


def test_nats_given_up_by_hand() -> None:
    logits = torch.tensor([[[2.0, 5.0, 1.0], [0.0, 0.0, 0.0]]])
    assert given_up_nats(logits, torch.tensor([[0, 2]])).tolist() == [[3.0, 0.0]]
    assert given_up_nats(logits.bfloat16(), torch.tensor([[2, 1]])).tolist() == [[4.0, 0.0]]
