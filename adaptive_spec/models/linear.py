"""Products of a few rows with a weight matrix, which is all that decoding on a CPU consists of.

A step multiplies each weight with the handful of tokens of its live rows.  That should cost what reading the weight
costs, whatever the number of tokens; the usual call, ``F.linear``, takes twice as long for two tokens as for one and
three times as long for four.  With its sides exchanged, weight @ tokens, the same product stays near the cost of
reading: decoding gets faster and verifying a short chain costs little more than one token.
"""

import torch
from torch import Tensor, nn

_FEW_TOKENS = 128
_PADDED = {1: 2, 3: 4}  # numbers of tokens for which one more is cheaper


class FewTokensLinear(nn.Linear):
    """A linear layer that is fast on a few tokens on a CPU, in float32.  Same parameters, same names."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        tokens = input.flatten(0, -2)
        count = len(tokens)
        if self.bias is not None or count > _FEW_TOKENS or input.device.type != "cpu" or input.dtype != torch.float32:
            return super().forward(input)
        if count in _PADDED:
            tokens = torch.cat([tokens, tokens[:1]])
        product = torch.mm(self.weight, tokens.t()).t()[:count]
        return product.contiguous().view(*input.shape[:-1], -1)


def exchange_linears(model: nn.Module) -> None:
    """Turn a model's plain linear layers into ``FewTokensLinear``, in place.  Parameters stay the same tensors."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewTokensLinear
