"""Slots written in place: the same gradients as slots that autograd stacks, however layers run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ltconvert.kernels import dispatch
from ltconvert.kernels.depth_attention import (
    DepthSlots,
    depth_attention,
    depth_only_attention,
    new_slots,
    write_slot,
)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BACKENDS = ["reference"]
if importlib.util.find_spec("triton") and (GPU or os.environ.get("TRITON_INTERPRET") == "1"):
    BACKENDS.append("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
LAYERS, SHAPE = 3, (1, 3, 2, 16)  # of a hidden state: batch, tokens, heads, width
Layer = Callable[[int, Tensor, Tensor, DepthSlots], tuple[Tensor, DepthSlots]]


def layer(at: int, h: Tensor, weight: Tensor, slots: DepthSlots) -> tuple[Tensor, DepthSlots]:
    """Reads the slots of earlier layers, alone and merged, and writes its own."""
    q, k, v = (h @ w for w in weight)
    keys, values = slots.keys_BTNGD, slots.values_BTNGD
    o, _, _ = depth_attention(
        q, k, v, keys, values, slots=at, scale=0.2, schedule=0.7, gradients=slots.gradients
    )
    if at:
        more, _ = depth_only_attention(
            q, keys, values, slots=at, scale=0.2, gradients=slots.gradients
        )
        o = o + more
    return h + o, write_slot(slots, at, k, v)


def stacked(weights: Tensor, h: Tensor) -> Tensor:
    """The same layers with slots that autograd keeps track of."""
    kept: list[tuple[Tensor, Tensor]] = []
    for at, weight in enumerate(weights):
        q, k, v = (h @ w for w in weight)
        depth = (
            [torch.stack(x, 2) for x in zip(*kept, strict=True)] if kept else [k[:, :, None]] * 2
        )
        o, _, _ = depth_attention(q, k, v, *depth, slots=at, scale=0.2, schedule=0.7)
        if at:
            o = o + depth_only_attention(q, *depth, slots=at, scale=0.2)[0]
        kept.append((k, v))
        h = h + o
    return h


def in_place(weights: Tensor, h: Tensor, run: Layer, *, gradients: bool = True) -> Tensor:
    slots = new_slots(LAYERS + 1, h, gradients=gradients)
    slots.k_NBTGD.fill_(float("nan"))
    for at, weight in enumerate(weights):
        h, slots = run(at, h, weight, slots)
    return h


def gradients_of(
    call: Callable[[Tensor, Tensor], Tensor], backend: str, times: int = 1
) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    weights = (torch.randn(LAYERS, 3, SHAPE[-1], SHAPE[-1], generator=g) / 4).to(DEVICE)
    h = torch.randn(SHAPE, generator=g).to(DEVICE)
    leaves = [weights.requires_grad_(), h.requires_grad_()]
    with dispatch.use(depth_attention=backend):
        out = call(*leaves)
        for left in range(times - 1, -1, -1):
            found = torch.autograd.grad(out.square().sum(), leaves, retain_graph=left > 0)
    return [out.detach(), *found]


def agree(found: list[Tensor], wanted: list[Tensor]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_stacked_slots(backend: str) -> None:
    wanted = gradients_of(stacked, "reference")
    for times in (1, 2) if backend == "reference" else (2,):
        agree(gradients_of(lambda w, h: in_place(w, h, layer), backend, times), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_may_be_checkpointed(backend: str) -> None:
    def run(*given: object) -> tuple[Tensor, DepthSlots]:
        return checkpoint(layer, *given, use_reentrant=False)

    wanted = gradients_of(stacked, "reference")
    agree(gradients_of(lambda w, h: in_place(w, h, run), backend), wanted)


@pytest.mark.skipif(
    torch.__version__ < (2, 12),
    reason="the tracer of torch 2.11 knows no properties of named tuples",
)
@pytest.mark.parametrize("backend", BACKENDS if GPU else ["reference"])
def test_layers_may_be_compiled(backend: str) -> None:
    run = torch.compile(layer, fullgraph=True, backend="inductor" if GPU else "aot_eager")
    wanted = gradients_of(stacked, "reference")
    agree(gradients_of(lambda w, h: in_place(w, h, run), backend), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradients(backend: str) -> None:
    wanted, *_ = gradients_of(stacked, "reference")
    g = torch.Generator().manual_seed(0)
    weights = (torch.randn(LAYERS, 3, SHAPE[-1], SHAPE[-1], generator=g) / 4).to(DEVICE)
    h = torch.randn(SHAPE, generator=g).to(DEVICE)
    with dispatch.use(depth_attention=backend), torch.no_grad():
        agree([in_place(weights, h, layer, gradients=False)], [wanted])


def test_mistakes_are_named() -> None:
    x = torch.zeros(SHAPE, device=DEVICE)
    slots = new_slots(2, x, gradients=False)
    with pytest.raises(ValueError, match="slots 0 to 1, got 2"):
        write_slot(slots, 2, x, x)
    with pytest.raises(
        ValueError, match=r"slots hold \[1, 3, 2, 16\] of torch.float32, got \[1, 2"
    ):
        write_slot(slots, 0, x[:, :2], x)
