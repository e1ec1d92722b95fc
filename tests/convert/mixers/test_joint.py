"""Projections of one input as one product give what they give one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ltconvert.convert.mixers import joint
from ltconvert.convert.mixers.joint import project_together


@pytest.mark.parametrize("tokens", [joint.FEW_TOKENS - 1, joint.FEW_TOKENS])
def test_values_and_gradients_are_those_of_the_layers(tokens: int) -> None:
    torch.manual_seed(0)
    widths, biases = (32, 3, 17, 5), (True, False, True, False)
    layers = [nn.Linear(24, n, bias=b).double() for n, b in zip(widths, biases, strict=True)]
    x = torch.randn(1, tokens, 24, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(1, tokens, n, dtype=torch.float64) for n in widths]
    tensors = [x, *(p for layer in layers for p in layer.parameters())]

    def gradients(outputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        total = sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))
        return torch.autograd.grad(total, tensors)

    together, apart = project_together(x, *layers), [layer(x) for layer in layers]
    for ours, right in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, right)
    for ours, right in zip(gradients(together), gradients(apart), strict=True):
        torch.testing.assert_close(ours, right)


def test_many_tokens_take_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [nn.Linear(8, n) for n in (16, 3)]
    products: list[torch.Size] = []
    linear = joint.F.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        products.append(weight.shape)
        return linear(x, weight, bias)

    monkeypatch.setattr(joint.F, "linear", counted)
    outputs = project_together(torch.randn(2, joint.FEW_TOKENS // 2, 8), *layers)
    assert [y.shape[-1] for y in outputs] == [16, 3]
    assert products == [(32, 8)]  # 19 rows, filled up to whole 16s
