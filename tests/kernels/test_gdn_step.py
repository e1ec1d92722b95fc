"""gdn_step against a loop over rows and heads in fp64; the Triton kernel three ways.

Without a GPU the kernel runs in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, needs_triton
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels import dispatch
from ltconvert.kernels.gdn_step import gdn_step
from ltconvert.kernels.parity import check, judge

EPS = 1e-5
# batch, heads, key width, value width, taps
SHAPES = [(2, 3, 5, 7, 4), (1, 1, 1, 1, 2), (2, 2, 16, 40, 8), (2, 2, 8, 130, 0)]
if GPU:
    SHAPES += [(1, 16, 128, 128, 4), (8, 16, 128, 128, 4), (3, 9, 64, 64, 4), (2, 2, 256, 256, 4)]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> dict[str, Any]:
    """Everything but the options; decays from half-lives of a token to a million."""
    batch, heads, key, value, taps = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
        return (scale * torch.randn(size, generator=generator)).to(device, to)

    channels = heads * (2 * key + value)
    state = torch.float64 if dtype == torch.float64 else torch.float32
    found = {
        "qkv_BC": normal(batch, channels),
        "beta_BH": normal(batch, heads),
        "decay_BH": normal(batch, heads, scale=5.0),
        "log_rate_H": normal(heads, to=state),
        "rate_bias_H": normal(heads, scale=5.0, to=state),
        "state_BHKV": normal(batch, heads, key, value, to=state),
        "norm_weight_HV": normal(heads, value, to=state),
        "gate_BHV": normal(batch, heads, value),
    }
    if taps:
        found["conv_weight_CW"] = normal(channels, taps)
        found["conv_history_BCP"] = normal(batch, channels, taps - 1)
    return found


def definition(
    given: dict[str, Any], work: torch.dtype, *, gate_fn: str, activation: str | None,
    beta_factor: float,
) -> dict[str, Tensor]:  # fmt: skip
    """One row and head at a time, in ``work``; returns what changes in place, too."""
    i = {name: value.to(work) for name, value in given.items()}
    batch, heads, key, value = i["state_BHKV"].shape
    x, history = i["qkv_BC"], i.get("conv_history_BCP")
    if history is not None:
        window = torch.cat([history, x[..., None]], -1)
        x, history = (window * i["conv_weight_CW"]).sum(-1), window[..., 1:]
        x = F.silu(x) if activation else x
    y, state = torch.empty_like(i["gate_BHV"]), torch.empty_like(i["state_BHKV"])
    for b in range(batch):
        for h in range(heads):
            q = x[b, h * key : (h + 1) * key]
            k = x[b, (heads + h) * key : (heads + h + 1) * key]
            v = x[b, 2 * heads * key + h * value : 2 * heads * key + (h + 1) * value]
            q, k = (z / (z.square().sum() + 1e-6).sqrt() for z in (q, k))
            beta = beta_factor * torch.sigmoid(i["beta_BH"][b, h])
            rate = F.softplus(i["decay_BH"][b, h] + i["rate_bias_H"][h])
            old = i["state_BHKV"][b, h] * torch.exp(-torch.exp(i["log_rate_H"][h]) * rate)
            new = old + beta * torch.outer(k, v - old.T @ k)
            out = new.T @ q * key**-0.5
            gate = i["gate_BHV"][b, h]
            opened = {"2sigmoid": 2 * gate.sigmoid(), "sigmoid": gate.sigmoid()}.get(
                gate_fn, F.silu(gate)
            )
            normed = out / (out.square().mean() + EPS).sqrt() * i["norm_weight_HV"][h]
            y[b, h], state[b, h] = normed * opened, new
    return {"y": y, "state": state} | ({} if history is None else {"history": history})


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
