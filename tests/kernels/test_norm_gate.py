"""norm_gate against its formula, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ltconvert.kernels.norm_gate import norm_gate

EPS = 1e-5


def by_formula(x: Tensor, weight: Tensor, gate: Tensor, gate_fn: str) -> Tensor:
    s = 1 / (1 + torch.exp(-gate))
    opened = {"2sigmoid": 2 * s, "sigmoid": s, "silu": gate * s}[gate_fn]
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight * opened


def inputs(*weight: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 7, 3, 11), weight, (2, 7, 3, 11))
    return [torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("gate_fn", ["2sigmoid", "sigmoid", "silu"])
@pytest.mark.parametrize("weight", [(11,), (3, 11)])
def test_value_and_gradients(gate_fn: str, weight: tuple[int, ...]) -> None:
    leaves = inputs(*weight)
    y, expected = norm_gate(*leaves, eps=EPS, gate_fn=gate_fn), by_formula(*leaves, gate_fn)
    torch.testing.assert_close(y, expected)
    upstream = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad(y, leaves, upstream)
    for a, b in zip(found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(a, b)


def test_low_precision_computes_in_fp32_and_changes_no_input() -> None:
    x, weight, gate = (leaf.detach() for leaf in inputs(3, 11))
    small = [x.bfloat16().requires_grad_(), weight.float().requires_grad_(), gate.bfloat16()]
    before = [t.detach().clone() for t in small]
    with torch.autocast("cpu", torch.bfloat16):
        y = norm_gate(*small, eps=EPS)
    assert y.dtype == torch.bfloat16
    expected = by_formula(*(t.double() for t in before), "2sigmoid")
    torch.testing.assert_close(y.double(), expected, atol=0.0, rtol=2**-8)
    y.float().sum().backward()
    assert small[0].grad.dtype == torch.bfloat16 and small[1].grad.dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(small, before, strict=True))


def test_only_the_inputs_are_kept() -> None:
    x, weight, gate = (leaf.detach().float().requires_grad_() for leaf in inputs(3, 11))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm_gate(x, weight, gate, eps=EPS)
    own = {t.data_ptr() for t in (x, weight, gate)}
    assert {t.data_ptr() for t in kept} == own


def test_a_zero_vector_is_zero() -> None:
    x = torch.zeros(2, 5, requires_grad=True)
    y = norm_gate(x, torch.ones(5), torch.ones(2, 5), eps=EPS)
    y.sum().backward()
    assert not y.any() and x.grad.isfinite().all()


def test_wrong_arguments_are_named() -> None:
    x, weight, gate = inputs(3, 11)
    with pytest.raises(ValueError, match="gate must have x's shape"):
        norm_gate(x, weight, gate[..., :-1], eps=EPS)
    with pytest.raises(ValueError, match="gate_fn must be"):
        norm_gate(x, weight, gate, eps=EPS, gate_fn="relu")
