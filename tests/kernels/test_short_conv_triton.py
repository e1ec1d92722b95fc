"""The Triton backend of short_conv: fp64 truth, plain PyTorch and kernel, three ways.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from ltconvert.kernels import dispatch
from ltconvert.kernels.parity import check, judge
from ltconvert.kernels.short_conv import short_conv
from ltconvert.kernels.short_conv import triton as backend

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]
LENGTHS = [1, 63, 65, 1000, 4097] if GPU else [1, 3, 18]
B, D = (3, 200) if GPU else (2, 5)

pytestmark = [
    pytest.mark.skipif(
        not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, no interpreter"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend asked for; in the interpreter programs so short that a row has several."""
    if not GPU:
        monkeypatch.setattr(backend, "ROWS", {"forward": 4, "backward": 2})
        monkeypatch.setattr(backend, "WALK", {"forward": 8, "backward": 16})
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests("triton"))


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor
    history: Tensor | None
    segments: Tensor | None
    keep: Tensor | None
    upstream: Tensor  # of y; zero at padding
    last_upstream: Tensor


def inputs(
    length: int, taps: int, dtype: torch.dtype, *, history: bool = False, segments: bool = False,
    keep: bool = False, scale: float = 1.0,
) -> Inputs:  # fmt: skip
    generator = torch.Generator().manual_seed(length + taps)

    def normal(*shape: int) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)

    ids = (torch.rand(B, length, generator=generator) < 0.4).cumsum(1).to(DEVICE)
    kept = (torch.rand(B, length, generator=generator) < 0.7).to(DEVICE)
    x, upstream = normal(B, length, D), normal(B, length, D)
    if keep:
        x[~kept], upstream[~kept] = torch.nan, 0
    return Inputs(
        x,
        torch.randn(D, taps, generator=generator).to(DEVICE, dtype),
        normal(B, D, taps - 1) if history else None,
        ids if segments else None,
        kept if keep else None,
        upstream,
        normal(B, D, taps - 1),
    )


def starts(segments: Tensor, keep: Tensor | None) -> Tensor:
    """Segment starts so far, token by token."""
    counts = torch.zeros_like(segments)
    for b, row in enumerate(segments.tolist()):
        current, count = None, 0
        for t, own in enumerate(row):
            if keep is None or keep[b, t]:
                count += current is not None and own != current
                current = own
            counts[b, t] = count
    return counts


def definition(i: Inputs, silu: bool, work: torch.dtype) -> dict[str, Tensor | None]:
    """A product of shifted sources, by autograd in ``work``."""
    leaves = [None if t is None else t.to(work).detach().requires_grad_() for t in i[:3]]
    x, weight, history = leaves
    past, length = weight.shape[1] - 1, x.shape[1]
    if i.keep is not None:
        x = x.masked_fill(~i.keep[..., None], 0)
    if history is None:
        history = x.new_zeros(B, D, past)
    source = torch.cat([history.transpose(1, 2), x], 1)
    counts = torch.zeros(B, length, dtype=torch.long, device=DEVICE)
    if i.segments is not None:
        counts = starts(i.segments.cpu(), None if i.keep is None else i.keep.cpu()).to(DEVICE)
    counts = torch.nn.functional.pad(counts, (past, 0))
    y = 0
    for tap in range(past + 1):
        seen = counts[:, tap : tap + length] == counts[:, past:]
        y = y + weight[:, tap] * source[:, tap : tap + length] * seen[..., None]
    y = torch.nn.functional.silu(y) if silu else y
    same = counts[:, length:] == counts[:, -1:]
    last = (source[:, length:] * same[..., None]).transpose(1, 2)
    return _results(i, y, last, leaves)


def kernel(i: Inputs, silu: bool) -> dict[str, Tensor | None]:
    leaves = [None if t is None else t.detach().requires_grad_() for t in i[:3]]
    return _results(i, *_call(i, leaves, silu), leaves)


def _call(i: Inputs, leaves: list[Tensor | None], silu: bool) -> tuple[Tensor, Tensor]:
    return short_conv(
        leaves[0],
        leaves[1],
        history_BDH=leaves[2],
        segment_ids_BT=i.segments,
        keep_BT=i.keep,
        activation="silu" if silu else None,
    )


def _results(
    i: Inputs, y: Tensor, last: Tensor, leaves: list[Tensor | None]
) -> dict[str, Tensor | None]:
    given = [leaf for leaf in leaves if leaf is not None]
    upstream = [i.upstream.to(y.dtype), i.last_upstream.to(y.dtype)]
    grads = iter(torch.autograd.grad([y, last], given, upstream))
    names = ("x gradient", "weight gradient", "history gradient")
    seen = y if i.keep is None else y.masked_fill(~i.keep[..., None], 0)
    return {"y": seen.detach(), "history": last.detach()} | {
        name: None if leaf is None else next(grads)
        for name, leaf in zip(names, leaves, strict=True)
    }


def compare(i: Inputs, silu: bool = False) -> None:
    truth, plain = (definition(i, silu, work) for work in (torch.float64, i.x.dtype))
    check(judge(truth, plain, kernel(i, silu), i.x.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("silu", [False, True])
def test_everything_given(length: int, silu: bool, dtype: torch.dtype) -> None:
    compare(inputs(length, 4, dtype, history=True, segments=True, keep=True), silu)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_x_alone(length: int, dtype: torch.dtype) -> None:
    compare(inputs(length, 4, dtype), silu=True)


@pytest.mark.parametrize("taps", [2, 3, 8])
def test_other_numbers_of_taps(taps: int) -> None:
    compare(inputs(LENGTHS[-1], taps, torch.float32, history=True, segments=True), silu=taps == 3)


def test_one_token_segments_and_padding_alone() -> None:
    i = inputs(7, 4, torch.float32, history=True)
    compare(i._replace(segments=torch.arange(7, device=DEVICE).expand(B, 7)))
    compare(i._replace(keep=torch.ones(B, 7, dtype=torch.bool, device=DEVICE)), silu=True)
    keep = torch.zeros(B, 7, dtype=torch.bool, device=DEVICE)
    compare(i._replace(keep=keep, upstream=torch.zeros_like(i.upstream)))


@pytest.mark.parametrize("scale", [0.0, 100.0])
def test_zero_and_large_inputs(scale: float) -> None:
    compare(inputs(9, 4, torch.float32, history=True, scale=scale), silu=True)


def test_inputs_that_are_not_contiguous() -> None:
    i = inputs(9, 4, torch.float32, history=True)
    wide = torch.full((9, B, 2 * D), torch.nan, device=DEVICE)
    wide[..., D:] = i.x.transpose(0, 1)
    history = i.history.transpose(1, 2).contiguous().transpose(1, 2)
    want = kernel(i, True)
    for x in (wide.transpose(0, 1)[..., D:], i.x.transpose(1, 2).contiguous().transpose(1, 2)):
        torch.testing.assert_close(kernel(i._replace(x=x, history=history), True), want)
    upstream = torch.ones(1, 1, 1, device=DEVICE).expand(i.x.shape)
    compare(i._replace(upstream=upstream))


def test_runs_repeat_bit_by_bit_under_a_graph_and_checkpointed() -> None:
    i = inputs(LENGTHS[-2], 3, DTYPES[-1], history=True, segments=True, keep=True)
    want = kernel(i, True)
    compiled = torch.compile(_call, fullgraph=True, backend="aot_eager")
    for call in (_call, compiled, lambda *a: checkpoint(_call, *a, use_reentrant=False)):
        leaves = [t.detach().requires_grad_() for t in i[:3]]
        with torch.autocast(DEVICE, torch.bfloat16):
            y, last = call(i, leaves, True)
        found = _results(i, y, last, leaves)
        assert all(torch.equal(found[name], want[name]) for name in want)


def test_gradients_that_nobody_asks_for() -> None:
    i = inputs(6, 4, torch.float32)
    y, last = short_conv(i.x, i.weight.requires_grad_())
    assert torch.autograd.grad(last.sum(), i.weight, retain_graph=True)[0].count_nonzero() == 0
    (found,) = torch.autograd.grad(y, i.weight, i.upstream)
    x = i.x.clone().requires_grad_()
    y = short_conv(x, i.weight)[0]
    assert torch.equal(torch.autograd.grad(y, [x, i.weight], i.upstream)[1], found)


def test_what_the_kernel_cannot_do_names_the_reference() -> None:
    x = torch.zeros(1, 2, 3, device=DEVICE)
    with pytest.raises(ValueError, match=r"in fp32, got fp64.*reference"):
        short_conv(x.double(), torch.zeros(3, 4, device=DEVICE))
    with pytest.raises(ValueError, match=r"at most 8 taps.*reference"):
        short_conv(x, torch.zeros(3, 9, device=DEVICE))
