"""The Triton backend of norm_gate: fp64 truth, plain PyTorch and kernel, three ways.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from ltconvert.kernels import dispatch
from ltconvert.kernels.norm_gate import norm_gate
from ltconvert.kernels.norm_gate import triton as backend
from ltconvert.kernels.parity import check, judge

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if GPU else [torch.float32]
TOKENS = [1, 63, 65, 1000, 4097] if GPU else [1, 13]
EPS = 1e-5
GATES = {
    "2sigmoid": lambda gate: 2 * torch.sigmoid(gate),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
}

pytestmark = [
    pytest.mark.skipif(
        not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="no GPU, no interpreter"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, in the interpreter
]


@pytest.fixture(autouse=True)
def _triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend asked for; in the interpreter tiles so small that there are several programs."""
    if not GPU:
        monkeypatch.setattr(backend, "ELEMENTS", {"forward": 128, "backward": 64})
        monkeypatch.setattr(backend, "TILES", 2)
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests("triton"))


def inputs(
    *shape: int, weight: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> list[Tensor]:
    """x, weight, gate and the upstream gradient."""
    generator = torch.Generator().manual_seed(3)
    x, w, gate, upstream = (
        torch.randn(s, generator=generator).to(DEVICE, dtype) for s in (shape, weight, shape, shape)
    )
    return [x * scale, w, gate * scale, upstream]


def results(
    leaves: list[Tensor], upstream: Tensor, gate_fn: str, work: torch.dtype | None
) -> dict[str, Tensor | None]:
    """Value and gradients: of the definition in ``work``, of the kernel when None."""
    leaves = [
        (leaf if work is None else leaf.to(work)).detach().requires_grad_() for leaf in leaves
    ]
    x, weight, gate = leaves
    if work is None:
        y = norm_gate(x, weight, gate, eps=EPS, gate_fn=gate_fn)
    else:
        y = F.rms_norm(x, x.shape[-1:], eps=EPS) * weight * GATES[gate_fn](gate)
    grads = torch.autograd.grad(y, leaves, upstream.to(y.dtype))
    names = ("x gradient", "weight gradient", "gate gradient")
    return {"y": y.detach(), **dict(zip(names, grads, strict=True))}


def compare(leaves: list[Tensor], gate_fn: str = "2sigmoid") -> dict[str, Tensor | None]:
    *leaves, upstream = leaves
    dtype = leaves[0].dtype
    truth, plain, found = (
        results(leaves, upstream, gate_fn, work) for work in (torch.float64, dtype, None)
    )
    check(judge(truth, plain, found, dtype))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("gate_fn", GATES)
@pytest.mark.parametrize("per_head", [False, True])
def test_value_and_gradients(tokens: int, gate_fn: str, per_head: bool, dtype: torch.dtype) -> None:
    width = 128 if GPU else 11
    weight = (3, width) if per_head else (width,)
    compare(inputs(2, tokens, 3, width, weight=weight, dtype=dtype), gate_fn)


@pytest.mark.parametrize("width", [1, 16, 40, 80, 256])
def test_widths(width: int) -> None:
    compare(inputs(5, 2, width, weight=(2, width)))
    compare(inputs(width, weight=(width,)))


@pytest.mark.parametrize("scale", [0.0, 1e3])
def test_zero_and_large_inputs(scale: float) -> None:
    found = compare(inputs(4, 2, 16, weight=(2, 16), scale=scale), "silu")
    assert all(value.isfinite().all() for value in found.values())


def test_weights_in_fp32_and_inputs_that_are_not_contiguous() -> None:
    x, weight, gate, upstream = inputs(6, 2, 16, weight=(2, 16), dtype=DTYPES[-1])
    weight = weight.float()
    want = results([x, weight, gate], upstream, "silu", None)
    assert want["y"].dtype == x.dtype and want["weight gradient"].dtype == torch.float32
    wide = torch.full((6, 2, 40), torch.nan, device=DEVICE, dtype=x.dtype)
    wide[..., 24:] = x
    for order in ((0, 1, 2), (1, 0, 2), (1, 2, 0)):
        back = [order.index(axis) for axis in range(3)]
        turned = gate.permute(order).contiguous().permute(back)
        torch.testing.assert_close(
            results([wide[..., 24:], weight, turned], upstream, "silu", None), want
        )
    compare([x, weight.to(x.dtype), gate, torch.ones(1, 1, 1, device=DEVICE).expand(x.shape)])


def test_runs_repeat_bit_by_bit_under_a_graph_and_checkpointed() -> None:
    *leaves, upstream = inputs(TOKENS[-1], 2, 16, weight=(2, 16), dtype=DTYPES[-1])
    want = results(leaves, upstream, "2sigmoid", None)

    def call(x: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        return norm_gate(x, weight, gate, eps=EPS)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for run in (call, compiled, lambda *a: checkpoint(call, *a, use_reentrant=False)):
        fresh = [leaf.detach().requires_grad_() for leaf in leaves]
        with torch.autocast(DEVICE, torch.bfloat16):
            y = run(*fresh)
        found = [y, *torch.autograd.grad(y, fresh, upstream)]
        assert all(torch.equal(a, b) for a, b in zip(found, want.values(), strict=True))


def test_fp64_names_the_reference() -> None:
    x = torch.zeros(2, 3, device=DEVICE)
    with pytest.raises(ValueError, match=r"in fp32, got fp64.*reference"):
        norm_gate(x.double(), x[0], x.double(), eps=EPS)
