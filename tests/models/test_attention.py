"""Grouped queries attend as transformers' own attention does."""

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from adaptive_spec.models.attention import group_queries, grouped_attention
from tests.conftest import tiny_model


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(("rows", "groups", "tokens", "keys"), [(1, 3, 4, 9), (3, 2, 5, 5), (2, 1, 3, 8), (2, 4, 1, 7)])
def test_it_equals_sdpa(rows: int, groups: int, tokens: int, keys: int, additive: bool) -> None:
    generator = torch.Generator().manual_seed(keys)
    module = nn.Module()
    module.num_key_value_groups = groups
    query = torch.randn(rows, 2 * groups, tokens, 16, generator=generator)
    key, value = (torch.randn(rows, 2, keys, 16, generator=generator) for _ in range(2))
    visible = torch.rand(rows, 1, tokens, keys, generator=generator) < 0.6
    visible[..., 0] = True
    mask = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf) if additive else visible
    for one in (mask, mask[:1]) if rows == 1 else (mask,):
        wanted, _ = sdpa_attention_forward(module, query, key, value, one, scaling=0.3)
        found, _ = grouped_attention(module, query, key, value, one, scaling=0.3)
        assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)


def test_without_a_mask_it_is_causal_and_what_it_does_not_know_it_leaves_to_sdpa() -> None:
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    wanted, _ = sdpa_attention_forward(module, query, key, key, None)
    assert torch.equal(grouped_attention(module, query, key, key, None)[0], wanted)
    with pytest.raises(ValueError, match="softcap"):
        grouped_attention(module, query, key, key, torch.ones(1, 1, 5, 5).bool(), softcap=30.0)


def test_a_whole_model_says_the_same_padded_batches_included() -> None:
    alone, grouped = tiny_model(0), tiny_model(0)
    group_queries(grouped)
    assert grouped.config._attn_implementation == "grouped_sdpa"
    ids = torch.randint(0, 250, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with torch.inference_mode():
        wanted, found = (model(ids, attention_mask=mask).logits for model in (alone, grouped))
    assert torch.allclose(found[mask.bool()], wanted[mask.bool()], atol=1e-5)
    said = [
        model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=257)
        for model in (alone, grouped)
    ]
    assert torch.equal(*said)
