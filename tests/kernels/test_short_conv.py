"""short_conv and norm_gate against their definitions, one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ltconvert.kernels.norm_gate import norm_gate
from ltconvert.kernels.short_conv import short_conv

B, T, D, W = 2, 13, 5, 4


def by_hand(x: Tensor, weight: Tensor, history: Tensor, segments: Tensor, keep: Tensor) -> Tensor:
    """Walk over tokens; a new segment forgets the past, padding reads as zero."""
    y = torch.zeros_like(x)
    for b in range(B):
        past = list(history[b].T)
        current = None
        for t in range(T):
            if keep[b, t]:
                if current is not None and segments[b, t] != current:
                    past = [torch.zeros(D, dtype=x.dtype)] * (W - 1)
                current = segments[b, t]
            past.append(x[b, t] if keep[b, t] else torch.zeros(D, dtype=x.dtype))
            past = past[-W:]
            y[b, t] = sum(weight[:, i] * past[i] for i in range(W))
    return torch.nn.functional.silu(y)


@pytest.mark.parametrize("masked", [False, True])
def test_value_gradients_and_history(masked: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, history = (
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_()
        for s in ((B, T, D), (D, W), (B, D, W - 1))
    )
    segments = torch.tensor([[0] * 4 + [1] + [2] * 8, [3] * 11 + [5] * 2])
    keep = torch.ones(B, T, dtype=torch.bool)
    if masked:
        keep[0, :2], keep[1, 6], keep[0, -1] = False, False, False
    arguments = {"segment_ids_BT": segments, "keep_BT": keep, "activation": "silu"}
    y, after = short_conv(x, weight, history_BDH=history, **arguments)
    expected = by_hand(x, weight, history, segments, keep)
    torch.testing.assert_close(y[keep], expected[keep])
    right = torch.autograd.grad(expected[keep].square().sum(), (x, weight, history), allow_unused=True)
    found = torch.autograd.grad(y[keep].square().sum(), (x, weight, history))
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
    more = torch.randn(B, 3, D, generator=generator, dtype=torch.float64)
    ends = segments[:, -1:].expand(B, 3)
    both = short_conv(
        torch.cat([x, more], 1), weight, history_BDH=history, segment_ids_BT=torch.cat([segments, ends], 1),
        keep_BT=torch.cat([keep, torch.ones(B, 3, dtype=torch.bool)], 1), activation="silu",
    )[0]
    torch.testing.assert_close(short_conv(more, weight, history_BDH=after, activation="silu")[0], both[:, T:])


def test_identity_weight_is_the_identity_in_every_dtype() -> None:
    weight = torch.zeros(D, W)
    weight[:, -1] = 1
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(B, T, D).to(dtype)
        y, history = short_conv(x, weight)
        assert torch.equal(y, x) and y.dtype == dtype and torch.equal(history, x[:, -3:].transpose(1, 2))


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\[channels, taps\]"):
        short_conv(torch.zeros(B, T, D), torch.zeros(D + 1, W))
    with pytest.raises(ValueError, match="history"):
        short_conv(torch.zeros(B, T, D), torch.zeros(D, W), history_BDH=torch.zeros(B, D, W))


@pytest.mark.parametrize("gate_fn", ["2sigmoid", "sigmoid", "silu"])
@pytest.mark.parametrize("per_head", [True, False])
def test_norm_gate_is_its_formula(gate_fn: str, per_head: bool) -> None:
    x, gate = torch.randn(2, 7, 3, 11, dtype=torch.float64), torch.randn(2, 7, 3, 11, dtype=torch.float64)
    weight = torch.randn((3, 11) if per_head else (11,), dtype=torch.float64)
    s = 1 / (1 + torch.exp(-gate))
    opened = {"2sigmoid": 2 * s, "sigmoid": s, "silu": gate * s}[gate_fn]
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight * opened
    torch.testing.assert_close(norm_gate(x, weight, gate, eps=1e-5, gate_fn=gate_fn), expected)
    low = norm_gate(x.bfloat16(), weight, gate, eps=1e-5, gate_fn=gate_fn)
    assert low.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="gate must"):
        norm_gate(x, weight, gate[..., :-1], eps=1e-5)
