"""What lies at the edge of every op: nothing to do, numbers near fp16's limits, far offsets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.decay_attention import decay_attention
from ltconvert.kernels.delta_rule import delta_rule
from ltconvert.kernels.gdn_step import gdn_step
from ltconvert.kernels.linear_kl import linear_kl
from ltconvert.kernels.norm_gate import norm_gate
from ltconvert.kernels.short_conv import short_conv

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, requires_grad=True)


def _delta_rule(batch: int, heads: int) -> Tensor:
    x, one = (batch, 3, heads, 8), (batch, 3, heads)
    return delta_rule(_leaf(*x), _leaf(*x), _leaf(*x), _leaf(*one), -_leaf(*one).abs())[0]


def _decay_attention(batch: int, heads: int) -> Tensor:
    x = (batch, 3, heads, 8)
    return decay_attention(_leaf(*x), _leaf(*x), _leaf(*x), -_leaf(*x[:3]).abs())[0]


def _gdn_step(batch: int) -> Tensor:
    heads, key, value = 2, 4, 6
    qkv, state = _leaf(batch, heads * (2 * key + value)), _leaf(batch, heads, key, value)
    small, weight, gate = _leaf(batch, heads), _leaf(heads, value), _leaf(batch, heads, value)
    with torch.no_grad():
        y = gdn_step(qkv, small, small, _leaf(heads), _leaf(heads), state, weight, gate, eps=1e-5)
    return y.requires_grad_()


EMPTY: dict[str, Callable[[], Tensor]] = {
    "delta_rule, no rows": lambda: _delta_rule(0, 2),
    "delta_rule, no heads": lambda: _delta_rule(1, 0),
    "decay_attention, no rows": lambda: _decay_attention(0, 2),
    "short_conv, no rows": lambda: short_conv(_leaf(0, 3, 8), _leaf(8, 4))[0],
    "norm_gate, no rows": lambda: norm_gate(_leaf(0, 8), _leaf(8), _leaf(0, 8), eps=1e-5),
    "linear_kl, no tokens": lambda: (
        linear_kl(_leaf(0, 8), _leaf(9, 8), _leaf(0, 8), _leaf(9, 8)).loss
    ),
    "gdn_step, no rows": lambda: _gdn_step(0),
}


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_do(name: str, backend: str) -> None:
    with dispatch.use(backend):
        result = EMPTY[name]()
    result.sum().backward()
    assert result.numel() == 0 or float(result.detach()) == 0


@pytest.mark.parametrize("call", [lambda: short_conv(_leaf(1, 0, 8), _leaf(8, 4))])
def test_no_tokens_are_named(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        call()


@pytest.mark.parametrize("strength", [3.0, 8.0])
def test_gradients_of_strong_decays_a_channel_keep_their_digits(strength: float) -> None:
    """They are small beside what a token adds to itself, which must not leave its rounding."""
    shape = (1, 64, 1, 16)
    q, k, v, do = (torch.randn(shape, device=DEVICE).half() for _ in range(4))
    beta = torch.rand(shape[:3], device=DEVICE)
    decay = -strength * (0.5 + torch.rand(shape, device=DEVICE))

    def gradient(backend: str, dtype: torch.dtype) -> Tensor:
        leaf = decay.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
        with dispatch.use(backend):
            o, _ = delta_rule(*(x.to(dtype) for x in (q, k, v)), beta.to(leaf.dtype), leaf)
        (o.double() * do.double()).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    truth, kernel = gradient("reference", torch.float64), gradient("triton", torch.float16)
    assert float((kernel - truth).norm() / truth.norm()) < 1e-2


def test_products_beyond_fp16_whose_outputs_are_not() -> None:
    q = torch.full((1, 4, 1, 128), 24.0, device=DEVICE).half()  # q . k = 73728
    v, decay = torch.randn(1, 4, 1, 8, device=DEVICE), -torch.rand(1, 4, 1, device=DEVICE)
    truth, _ = decay_attention(q.double(), q.double(), v.half().double(), decay.double())
    with dispatch.use("triton"):
        kernel, _ = decay_attention(q, q, v.half(), decay)
    torch.testing.assert_close(kernel.double(), truth, rtol=4e-3, atol=4e-3 * float(truth.max()))


def test_small_losses_under_fp16_autocast_reach_the_hidden_states() -> None:
    tokens, width, vocab, weight = 256, 8, 40, 1e-3
    sizes = ((tokens, width), (vocab, width)) * 2
    student, head, teacher, teacher_head = (0.3 * torch.randn(s, device=DEVICE) for s in sizes)

    def gradient(backend: str, dtype: torch.dtype, half: bool) -> Tensor:
        leaf = student.to(dtype).requires_grad_()
        others = (x.to(dtype) for x in (head, teacher, teacher_head))
        with dispatch.use(backend), torch.autocast(DEVICE, dtype=torch.float16, enabled=half):
            loss = linear_kl(leaf, *others).loss
        (loss * weight).backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    truth = gradient("reference", torch.float64, False)
    kernel = gradient("triton", torch.float32, True)
    assert float((kernel - truth).norm() / truth.norm()) < 5e-3


@pytest.mark.skipif(DEVICE != "cpu", reason="address space that nothing fills, as a CPU has it")
def test_rows_that_span_more_than_32_bits() -> None:
    """Forward and backward over q and k as slices of one wide row."""
    stride, length, width = 17_000_000, 130, 16
    room = torch.empty(length * stride, dtype=torch.float16)  # never touched but in these slices
    q, k = (room.as_strided((1, length, 1, width), (0, stride, width, 1), at) for at in (0, 64))
    for x in (q, k):
        x.copy_(torch.randn(x.shape))
    v, do = torch.randn(1, length, 1, width), torch.randn(1, length, 1, width)
    decay = -torch.rand(1, length, 1)

    def gradients(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        leaves = [q.detach().requires_grad_(), k.detach().requires_grad_(), v.half()]
        with dispatch.use("triton"):
            o, _ = decay_attention(*leaves, decay)
        return o, *torch.autograd.grad(o, leaves[:2], do.half())

    far, near = gradients(q, k), gradients(q.contiguous(), k.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(far, near, strict=True))
