"""Exchanged products: the same numbers, the same parameters."""

import pytest
import torch
from torch import nn

from adaptive_spec.models.linear import FewTokensLinear, exchange_linears


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 3), (3, 4), (8, 7), (1, 129), (5,)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_a_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 40, bias=bias))
    tokens = torch.randn(*shape, 24)
    wanted, parameters = module(tokens), dict(module.named_parameters())
    exchange_linears(module)
    exchange_linears(module)
    assert type(module[0]) is FewTokensLinear
    assert torch.allclose(module(tokens), wanted, atol=1e-5)
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    half = module.to(torch.bfloat16)(tokens.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16 and torch.allclose(half.float(), wanted, atol=0.1)


def test_gradients_flow() -> None:
    module = nn.Sequential(nn.Linear(6, 4, bias=False))
    exchange_linears(module)
    module(torch.ones(3, 6)).sum().backward()
    assert torch.equal(module[0].weight.grad, torch.full((4, 6), 3.0))


def test_other_kinds_of_layers_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    module = nn.Sequential(Special(2, 2), nn.LayerNorm(2))
    exchange_linears(module)
    assert type(module[0]) is Special
