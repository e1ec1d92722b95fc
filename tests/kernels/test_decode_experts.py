"""decode_experts against its formula in fp64; the Triton kernel three ways.

Without a GPU the kernel runs in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, needs_triton
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.decode_experts import decode_experts, reference
from ltconvert.kernels.parity import check, judge

# tokens, choices, experts, channels, outputs
SHAPES = [(1, 1, 1, 1, 1), (1, 3, 4, 70, 37), (2, 2, 3, 600, 5), (5, 4, 6, 16, 19)]
if GPU:
    SHAPES += [
        (1, 2, 30, 576, 960), (1, 6, 120, 576, 768), (1, 6, 120, 384, 576),
        (8, 2, 24, 2048, 6144), (8, 6, 96, 2048, 2816), (8, 6, 96, 1408, 2048), (3, 8, 9, 2047, 99),
    ]  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


def inputs(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    *,
    shared: bool,
    summed: bool,
    bias: bool = True,
    residual: bool = False,
    activation: str | None = None,
) -> dict[str, Any]:
    """Random tensors; about a fifth of the choices are nulls."""
    tokens, choices, experts, channels, outputs = shape
    rows = outputs if activation is None else 2 * outputs
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(size, generator=generator)).to(device, dtype)

    most = experts + max(1, experts // 4)
    chosen_NK = torch.randint(0, most, (tokens, choices), generator=generator)
    return {
        "x": normal(*((tokens,) if shared else (tokens, choices)), channels),
        "weight_ERC": normal(experts, rows, channels, scale=channels**-0.5),
        "bias_ER": normal(experts, rows) if bias else None,
        "chosen_NK": chosen_NK.to(device),
        "weights_NK": torch.rand(tokens, choices, generator=generator).to(device)
        if summed
        else None,
        "residual_NO": normal(tokens, outputs) if residual else None,
        "swiglu": activation is not None,
        "activation": activation or "silu",
    }


def definition(given: dict[str, Any], work: torch.dtype) -> dict[str, Tensor]:
    """The formula in ``work``, choice by choice."""
    x, weight, bias = (
        None if given[name] is None else given[name].to(work)
        for name in ("x", "weight_ERC", "bias_ER")
    )
    assert x is not None and weight is not None
    rows = []
    for n, chosen_K in enumerate(given["chosen_NK"].tolist()):
        row = torch.zeros(len(chosen_K), weight.shape[1], dtype=work, device=x.device)
        for k, expert in enumerate(chosen_K):
            if expert < len(weight):
                row[k] = weight[expert] @ (x[n] if x.dim() == 2 else x[n, k])
                row[k] += 0.0 if bias is None else bias[expert]
        rows.append(row)
    y_NKO = torch.stack(rows)
    if given["swiglu"]:
        gate, up = y_NKO.chunk(2, dim=-1)
        cubic = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        share = {"silu": gate.sigmoid(), "gelu_tanh": (cubic.tanh() + 1) / 2}
        y_NKO = gate * share[given["activation"]] * up
    if given["weights_NK"] is None:
        return {"y": y_NKO}
    y_NO = (given["weights_NK"].to(work)[..., None] * y_NKO).sum(1)
    residual = given["residual_NO"]
    return {"y": y_NO if residual is None else y_NO + residual.to(work)}


@pytest.fixture(params=["reference", "copies", pytest.param("triton", marks=needs_triton)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Blocks smaller than the interpreter's shapes, so that loops go round.

    With "copies" the reference does on a CPU what it does elsewhere.
    """
    if request.param == "copies":
        monkeypatch.setattr(reference, "_one_by_one", reference._side_by_side)
    if request.param == "triton" and not GPU:
        from ltconvert.kernels.decode_experts import triton

        monkeypatch.setattr(triton, "BLOCK_BYTES", 256)
        monkeypatch.setattr(triton, "PROGRAMS", 0.1)
    with dispatch.use("triton" if request.param == "triton" else "reference"):
        yield request.param


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_value(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, summed: bool, shared: bool
) -> None:
    bias, residual = sum(shape) % 2 == 0, summed and shared
    given = inputs(shape, dtype, shared=shared, summed=summed, bias=bias, residual=residual)
    truth, plain = (definition(given, work) for work in (torch.float64, dtype))
    found = decode_experts(**given)
    assert found.dtype == dtype and found.is_contiguous()
    check(judge(truth, plain, {"y": found}, dtype))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gates(backend: str, shape: tuple[int, ...], dtype: torch.dtype, activation: str) -> None:
    shared = activation == "silu"
    given = inputs(shape, dtype, shared=shared, summed=False, activation=activation)
    truth, plain = (definition(given, work) for work in (torch.float64, dtype))
    found = decode_experts(**given)
    assert found.shape == (*shape[:2], shape[4]) and found.is_contiguous()
    check(judge(truth, plain, {"y": found}, dtype))


def test_nulls_and_what_nobody_chose_are_not_read(backend: str) -> None:
    given = inputs((2, 2, 3, 16, 5), shared=True, summed=True)
    given["weight_ERC"][1:] = given["bias_ER"][1:] = float("nan")
    given["chosen_NK"] = torch.tensor([[0, 3], [4, 5]], device=DEVICE)
    found = decode_experts(**given)
    torch.testing.assert_close(found, definition(given, torch.float64)["y"].float())
    assert not found[1].any()


def test_fp64_in_the_reference() -> None:
    given = inputs((3, 2, 4, 40, 7), torch.float64, "cpu", shared=True, summed=True)
    torch.testing.assert_close(decode_experts(**given), definition(given, torch.float64)["y"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2, 3, 7)}, r"x must be \[2, 7\] or \[2, 2, 7\], got \[2, 3, 7\]"),
        ({"bias_ER": torch.zeros(4)}, r"bias must be \[3, 5\]"),
        ({"weights_NK": torch.zeros(2)}, r"choices' weights must be \[2, 2\], got \[2\]"),
        ({"residual_NO": torch.zeros(2, 4)}, r"residual must be \[2, 5\], got \[2, 4\]"),
        ({"weights_NK": None, "residual_NO": torch.zeros(2, 5)}, "residual needs weights"),
        ({"weight_ERC": torch.zeros(3, 4, 7), "bias_ER": None, "swiglu": True}, "not take"),
        ({"swiglu": True, "weights_NK": None}, "twice the outputs, got 5 rows"),
        ({"weight_ERC": torch.zeros(3, 5, 7).half()}, "x's dtype torch.float32, got torch.float16"),
        ({"weight_ERC": torch.zeros(3, 5, 7).requires_grad_()}, "has no gradient"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    given = inputs((2, 2, 3, 7, 5), device="cpu", shared=True, summed=True)
    with pytest.raises(ValueError, match=message):
        decode_experts(**(given | changed))
