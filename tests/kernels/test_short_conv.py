"""short_conv against its definition, one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ltconvert.kernels.short_conv import reference, short_conv

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
    leaves = (x, weight, history)
    right = torch.autograd.grad(expected[keep].square().sum(), leaves)
    found = torch.autograd.grad(y[keep].square().sum(), leaves)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)
    more = torch.randn(B, 3, D, generator=generator, dtype=torch.float64)
    ends = segments[:, -1:].expand(B, 3)
    both = short_conv(
        torch.cat([x, more], 1),
        weight,
        history_BDH=history,
        segment_ids_BT=torch.cat([segments, ends], 1),
        keep_BT=torch.cat([keep, torch.ones(B, 3, dtype=torch.bool)], 1),
        activation="silu",
    )[0]
    continued = short_conv(more, weight, history_BDH=after, activation="silu")[0]
    torch.testing.assert_close(continued, both[:, T:])


def test_identity_weight_is_the_identity_in_every_dtype() -> None:
    weight = torch.zeros(D, W)
    weight[:, -1] = 1
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(B, T, D).to(dtype)
        y, history = short_conv(x, weight)
        assert torch.equal(y, x) and y.dtype == dtype
        assert torch.equal(history, x[:, -3:].transpose(1, 2))


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\[channels, taps\]"):
        short_conv(torch.zeros(B, T, D), torch.zeros(D + 1, W))
    with pytest.raises(ValueError, match="history"):
        short_conv(torch.zeros(B, T, D), torch.zeros(D, W), history_BDH=torch.zeros(B, D, W))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, activation: str | None) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(B, T, D, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(D, W, generator=generator, dtype=torch.float64, requires_grad=True)
    segments = (torch.arange(T) // 5).expand(B, T)

    def results() -> list[Tensor]:
        y, history = short_conv(x, weight, segment_ids_BT=segments, activation=activation)
        loss = y.square().sum() + history.sum()
        return [y, history, *torch.autograd.grad(loss, (x, weight))]

    whole = results()
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 1)
    for a, b in zip(results(), whole, strict=True):
        torch.testing.assert_close(a, b)


def test_pads_may_hold_anything_and_the_history_crosses_short_rows() -> None:
    x = torch.randn(1, 2, D, dtype=torch.float64)
    weight = torch.randn(D, W, dtype=torch.float64)
    history = torch.randn(1, D, W - 1, dtype=torch.float64)
    x[0, 0] = torch.nan
    y, after = short_conv(
        x, weight, history_BDH=history, keep_BT=torch.tensor([[False, True]]), activation=None
    )
    want = torch.stack([history[0, :, 2], torch.zeros(D, dtype=x.dtype), x[0, 1]], dim=-1)
    assert torch.equal(after[0], want)
    seen = torch.cat([history[0, :, 1:2], want], dim=-1)
    torch.testing.assert_close(y[0, 1], (seen * weight).sum(-1))


def test_gradients_in_low_precision_have_the_inputs_dtypes() -> None:
    x = torch.randn(B, T, D).bfloat16().requires_grad_()
    weight = torch.randn(D, W, requires_grad=True)
    y = short_conv(x, weight, activation="silu")[0]
    y.float().sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
