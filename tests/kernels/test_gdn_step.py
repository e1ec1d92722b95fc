"""gdn_step against a loop over rows and heads in fp64; the Triton kernel three ways.

Without a GPU the kernel runs in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, needs_triton
from gdn_case import EPS, definition, inputs
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.gdn_step import gdn_step
from ltconvert.kernels.parity import check, judge

# batch, heads, key width, value width, taps
SHAPES = [(2, 3, 5, 7, 4), (1, 1, 1, 1, 2), (2, 2, 16, 40, 8), (2, 2, 8, 130, 0)]
if GPU:
    SHAPES += [(1, 16, 128, 128, 4), (8, 16, 128, 128, 4), (3, 9, 64, 64, 4), (2, 2, 256, 256, 4)]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


def run(given: dict[str, Any], function: Any = gdn_step, **options: Any) -> dict[str, Tensor]:
    given = {name: value.clone() for name, value in given.items()}
    y = function(**given, eps=EPS, **options)
    found = {"y": y, "state": given["state_BHKV"]}
    return found | ({"history": given["conv_history_BCP"]} if "conv_history_BCP" in given else {})


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_triton)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests(request.param))
    return request.param


@pytest.mark.parametrize("gate_fn", ["2sigmoid", "sigmoid", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_state_and_history(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, gate_fn: Any
) -> None:
    other = gate_fn == "silu"
    options = {
        "gate_fn": gate_fn,
        "activation": "silu" if other else None,
        "beta_factor": 2.0 if other else 1.0,
    }
    given = inputs(shape, dtype)
    truth, plain = (definition(given, work, **options) for work in (torch.float64, dtype))
    found = run(given, **options)
    assert found["y"].dtype == dtype and found["state"].dtype == torch.float32
    check(judge(truth, plain, found, dtype))


def test_fp64_in_the_reference() -> None:
    given = inputs(SHAPES[0], torch.float64, "cpu")
    options = {"gate_fn": "sigmoid", "activation": "silu", "beta_factor": 2.0}
    with dispatch.use("reference"):
        found = run(given, **options)
    torch.testing.assert_close(found, definition(given, torch.float64, **options))


def test_zero_inputs_are_zero(backend: str) -> None:
    given = {name: torch.zeros_like(value) for name, value in inputs(SHAPES[0]).items()}
    assert not any(value.any() for value in run(given).values())


def test_state_and_history_may_lie_anywhere(backend: str) -> None:
    given = inputs(SHAPES[0])
    want = run(given)
    state = given["state_BHKV"].mT.contiguous().mT
    history = torch.zeros(*given["conv_history_BCP"].shape[:2], 5, device=DEVICE)[..., :3]
    history.copy_(given["conv_history_BCP"])
    y = gdn_step(**{**given, "state_BHKV": state, "conv_history_BCP": history}, eps=EPS)
    torch.testing.assert_close({"y": y, "state": state, "history": history}, want)


def test_inputs_may_be_columns_of_one_product(backend: str) -> None:
    given = inputs(SHAPES[0])
    want = run(given)
    names = ("gate_BHV", "qkv_BC", "decay_BH", "beta_BH")
    flat = [given[name].flatten(1) for name in names]
    product = torch.cat([torch.full_like(flat[0], torch.nan), *flat], dim=1)
    columns = product.split([flat[0].shape[1], *(x.shape[1] for x in flat)], dim=1)[1:]
    for name, column in zip(names, columns, strict=True):
        given[name] = column.view(given[name].shape)
    live = {name: given[name].clone() for name in ("state_BHKV", "conv_history_BCP")}
    y = gdn_step(**{**given, **live}, eps=EPS)
    torch.testing.assert_close(y, want["y"])
    torch.testing.assert_close(live["state_BHKV"], want["state"])


def test_a_graph_takes_it_and_runs_repeat(backend: str) -> None:
    given = inputs(SHAPES[0], DTYPES[-1])
    want = run(given)
    again = run(given)
    assert all(torch.equal(again[name], want[name]) for name in want)
    compiled = torch.compile(gdn_step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(run(given, compiled), want)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_cuda_graph_takes_it() -> None:
    given = inputs(SHAPES[-1], torch.bfloat16)
    want = run(given)
    live = {name: value.clone() for name, value in given.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gdn_step(**live, eps=EPS)
    graph.replay()
    assert torch.equal(y, want["y"]) and torch.equal(live["state_BHKV"], want["state"])
    assert torch.equal(live["conv_history_BCP"], want["history"])


def test_wrong_arguments_are_named() -> None:
    given = inputs(SHAPES[0])
    with pytest.raises(ValueError, match=r"qkv must be \[2, 51\]"):
        gdn_step(**{**given, "qkv_BC": given["qkv_BC"][:, 1:]}, eps=EPS)
    with pytest.raises(ValueError, match="go together"):
        gdn_step(**{**given, "conv_history_BCP": None}, eps=EPS)
    with pytest.raises(ValueError, match=r"\[channels, taps\]"):
        gdn_step(**{**given, "conv_weight_CW": given["conv_weight_CW"][:, :1]}, eps=EPS)
    with pytest.raises(ValueError, match="history must be"):
        gdn_step(**{**given, "conv_weight_CW": given["conv_weight_CW"][:, 1:]}, eps=EPS)
    with pytest.raises(ValueError, match="gate_fn"):
        gdn_step(**given, eps=EPS, gate_fn="relu")


@needs_triton
def test_fp64_names_the_reference() -> None:
    with (
        dispatch.use("triton"),
        pytest.raises(ValueError, match=r"in fp32, got fp64.*reference"),
    ):
        run(inputs(SHAPES[0], torch.float64))
