"""decode_linear against its formula in fp64; the Triton kernels three ways.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, needs_triton
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.decode_linear import decode_linear
from ltconvert.kernels.parity import check, judge

# batch, channels, outputs
SHAPES = [(1, 1, 1), (1, 70, 37), (1, 129, 5), (2, 70, 37), (5, 130, 70), (16, 65, 16)]
if GPU:
    SHAPES += [
        (1, 2048, 6144), (1, 2048, 2048), (1, 5632, 2048), (1, 2047, 999), (1, 8192, 16),
        (8, 2048, 6144), (8, 2048, 2048), (8, 5632, 2048), (16, 2047, 999), (3, 576, 49152),
    ]  # fmt: skip
EVERYTHING = {"bias": True, "norm": True, "residual": True}
LAYERS: dict[str, dict[str, Any]] = {
    "product": {},
    "norm, bias and residual": EVERYTHING | {"norm_offset": 1.0, "norm_eps": 1e-2},
    "norm": {"norm": True},
    "silu": {"swiglu": True},
    "all of it, silu": EVERYTHING | {"swiglu": True},
    "all of it, gelu": EVERYTHING | {"swiglu": True, "activation": "gelu_tanh"},
}

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


def inputs(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    device: str = DEVICE,
    *,
    bias: bool = False,
    norm: bool = False,
    residual: bool = False,
    swiglu: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Random tensors and the options."""
    batch, channels, outputs = shape
    rows = 2 * outputs if swiglu else outputs
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
        return (scale * torch.randn(size, generator=generator)).to(device, to)

    return {
        "x_BC": normal(batch, channels, scale=1.0 if norm else 1.5),
        "weight_OC": normal(rows, channels, scale=channels**-0.5),
        "bias_O": normal(rows) if bias else None,
        "norm_weight_C": normal(channels) if norm else None,
        "residual_BO": normal(batch, outputs) if residual else None,
        "swiglu": swiglu,
        **options,
    }


def definition(given: dict[str, Any], work: torch.dtype) -> dict[str, Tensor]:
    """The formula in ``work``."""
    i = {name: x.to(work) if isinstance(x, Tensor) else x for name, x in given.items()}
    x, bias, norm, residual = (
        i[name] for name in ("x_BC", "bias_O", "norm_weight_C", "residual_BO")
    )
    if norm is not None:
        size = (x.square().mean(1, keepdim=True) + i.get("norm_eps", 1e-6)).sqrt()
        x = x / size * (i.get("norm_offset", 0.0) + norm)
    y = torch.stack([weight @ x.mT for weight in i["weight_OC"].unbind()], 1)
    y = y if bias is None else y + bias
    if i["swiglu"]:
        gate, up = y.split(y.shape[1] // 2, 1)
        if i.get("activation", "silu") == "silu":
            gate = gate / (1 + (-gate).exp())
        else:
            gate = gate * (1 + (math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)).tanh()) / 2
        y = gate * up
    return {"y": y if residual is None else y + residual}


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_triton)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend asked for; in the interpreter blocks so small that there are several."""
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests(request.param))
    if request.param != "triton":
        yield request.param
        return
    from ltconvert.kernels.decode_linear import triton

    plans = (triton._plan_single, triton._plan_several)
    if not GPU:
        monkeypatch.setattr(triton, "ROW_BYTES", 128)
        monkeypatch.setattr(triton, "LEAST", {"single": 0.05, "several": 0.02})
    for plan in plans:
        plan.cache_clear()
    yield request.param
    for plan in plans:
        plan.cache_clear()


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_value(backend: str, shape: tuple[int, ...], dtype: torch.dtype, layers: str) -> None:
    given = inputs(shape, dtype, **LAYERS[layers])
    truth, plain = (definition(given, work) for work in (torch.float64, dtype))
    found = decode_linear(**given)
    assert found.dtype == dtype and found.is_contiguous()
    check(judge(truth, plain, {"y": found}, dtype))


@pytest.mark.parametrize("outputs", [1, 2, 8])
@pytest.mark.parametrize("swiglu", [False, True])
def test_any_number_of_outputs_a_program(
    backend: str, outputs: int, swiglu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs((1, 70, 19), swiglu=swiglu, residual=True)
    if backend == "triton":
        from ltconvert.kernels.decode_linear import triton

        monkeypatch.setattr(triton, "_most", lambda *sizes: outputs)
    found = decode_linear(**given)
    torch.testing.assert_close(found, definition(given, torch.float64)["y"].float())


def test_fp64_and_many_rows_in_the_reference() -> None:
    for shape in ((3, 40, 7), (40, 30, 7)):
        given = inputs(shape, torch.float64, "cpu", **LAYERS["all of it, gelu"])
        with dispatch.use("reference"):
            found = decode_linear(**given)
        torch.testing.assert_close(found, definition(given, torch.float64)["y"])


@pytest.mark.parametrize("batch", [1, 3])
def test_a_norm_is_rounded_as_the_layer_rounds_it(backend: str, batch: int) -> None:
    """Seen through a weight that hands channels on; products with 0 and 1 add no error."""
    width = 96
    given = inputs((batch, width, width), torch.float16, norm=True)
    given["weight_OC"] = torch.eye(width, device=DEVICE, dtype=torch.float16)
    given["norm_weight_C"] = given["norm_weight_C"].float()
    found = decode_linear(**given)
    x = given["x_BC"].double()
    want = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * given["norm_weight_C"].double()
    assert (found == want.half()).float().mean() > 0.99  # but for ties


@pytest.mark.parametrize("batch", [1, 3])
def test_tensors_may_lie_anywhere(backend: str, batch: int) -> None:
    given = inputs((batch, 70, 37), DTYPES[-1], **LAYERS["all of it, silu"])
    want = decode_linear(**given)
    for name in ("x_BC", "residual_BO"):
        given[name] = given[name].mT.contiguous().mT
    for name in ("bias_O", "norm_weight_C"):
        given[name] = given[name].repeat_interleave(2)[::2]
    wide = torch.full((2 * 37, 100), torch.nan, device=DEVICE, dtype=DTYPES[-1])
    wide[:, 7:77] = given["weight_OC"]
    given["weight_OC"] = wide[:, 7:77]
    torch.testing.assert_close(decode_linear(**given), want)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_row_does_not_depend_on_others(backend: str, batch: int) -> None:
    given = inputs((batch, 70, 37), **LAYERS["all of it, silu"])
    want = decode_linear(**given)[-1]
    given["x_BC"][:-1] = torch.nan
    torch.testing.assert_close(decode_linear(**given)[-1], want)
    given["x_BC"][-1] = 0.0
    given["residual_BO"] = given["bias_O"] = None
    assert not decode_linear(**given)[-1].any()


@pytest.mark.parametrize("batch", [1, 3])
def test_runs_repeat(backend: str, batch: int) -> None:
    given = inputs((batch, 70, 37), DTYPES[-1], **LAYERS["all of it, gelu"])
    want = decode_linear(**given)
    assert torch.equal(decode_linear(**given), want)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("batch", [1, 8])
def test_a_cuda_graph_takes_it(batch: int) -> None:
    given = inputs((batch, 2048, 1024), torch.bfloat16, **LAYERS["all of it, silu"])
    want = decode_linear(**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = decode_linear(**given)
    graph.replay()
    assert torch.equal(y, want)


@pytest.mark.parametrize("shape", [(0, 70, 37), (1, 70, 0), (3, 70, 0)])
def test_nothing_to_do(backend: str, shape: tuple[int, ...]) -> None:
    given = inputs(shape, **LAYERS["all of it, silu"])
    assert decode_linear(**given).shape == (shape[0], shape[2])


def test_outputs_of_a_program_follow_sizes_alone() -> None:
    pytest.importorskip("triton")
    from ltconvert.kernels.decode_linear import triton

    for outputs in (2048, 5632, 6144, 49152):
        for swiglu in (False, True):
            one = triton._plan_single(outputs, 2048, 2, swiglu, 132).constants
            assert outputs / one["BO"] >= 1.5 * 132
            several = triton._plan_several(outputs, 2048, 2, swiglu, 132).constants
            assert outputs / several["BO"] >= 0.95 * 132 and several["BC"] >= 64


def test_wrong_arguments_are_named() -> None:
    given = inputs((2, 70, 37), **LAYERS["all of it, silu"])
    for name, wrong, match in (
        ("weight_OC", given["weight_OC"][:, 1:], r"must be \[outputs, 70\] .*got \[74, 69\]"),
        ("weight_OC", given["weight_OC"][1:], "twice the outputs, got 73 rows"),
        ("bias_O", given["bias_O"][:37], r"bias must be \[74\], got \[37\]"),
        ("norm_weight_C", given["norm_weight_C"][1:], r"norm's weight must be \[70\]"),
        ("residual_BO", given["residual_BO"][:1], r"residual must be \[2, 37\], got \[1, 37\]"),
        ("weight_OC", given["weight_OC"].double(), r"weight must have x's dtype torch.float32"),
        ("residual_BO", given["residual_BO"].double(), r"residual must have x's dtype"),
        ("activation", "relu", r"'silu' or 'gelu_tanh', got 'relu'"),
    ):
        with pytest.raises(ValueError, match=match):
            decode_linear(**{**given, name: wrong})


def test_a_gradient_is_refused() -> None:
    given = inputs((2, 70, 37))
    given["weight_OC"].requires_grad_()
    with pytest.raises(ValueError, match="decode_linear has no gradient"):
        decode_linear(**given)
    with torch.no_grad():
        decode_linear(**given)


@needs_triton
def test_what_the_kernel_does_not_take_names_the_reference() -> None:
    turned = inputs((1, 6, 5))
    turned["weight_OC"] = turned["weight_OC"].mT.contiguous().mT
    for given, match in (
        (inputs((1, 6, 5), torch.float64), "in fp32, got fp64"),
        (inputs((17, 6, 5)), "at most 16 rows, got 17"),
        (turned, "side by side"),
    ):
        with dispatch.use("triton"), pytest.raises(ValueError, match=rf"{match}.*reference"):
            decode_linear(**given)
        with dispatch.use("auto"):
            decode_linear(**given)
