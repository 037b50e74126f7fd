"""Attention of a few tokens over a long cache, without copying the cache.

Where several query heads share a key head, transformers' sdpa attention repeats keys and values for every one of them
as soon as there is a mask and more than one token, which is every verification: with 4,000 tokens of context that copy
takes longer than the rest of the layer.  Queries that share a head can as well stand one below the other, as if they
were more tokens; the products are the same.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "grouped_sdpa"


def group_queries(model: PreTrainedModel) -> None:
    """Let a model that attends by sdpa group its queries from now on."""
    AttentionInterface.register(_NAME, grouped_attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(_NAME)


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' sdpa attention does.

    Args:
        query: [rows, heads, tokens, head_dim]; key, value: [rows, key heads, keys, head_dim].
        attention_mask: [rows or 1, 1, tokens, keys] bool or additive; None: plainly causal.

    Returns:
        [rows, tokens, heads, head_dim], None.
    """
    rows, heads, tokens, head_dim = query.shape
    groups = heads // key.shape[1]
    special = any(value is not None for name, value in kwargs.items() if name in ("softcap", "position_bias"))
    if attention_mask is None or attention_mask.shape[1] != 1 or groups == 1 or tokens == 1 or special:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return output, None
    stacked = query.reshape(rows, heads // groups, groups * tokens, head_dim)
    mask = attention_mask.repeat(1, 1, groups, 1)
    found = torch.nn.functional.scaled_dot_product_attention(
        stacked, key, value, attn_mask=mask, scale=kwargs.get("scaling")
    )
    return found.view(rows, heads, tokens, head_dim).transpose(1, 2).contiguous(), None
