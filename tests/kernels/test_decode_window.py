"""decode_window against a loop over rows and heads in fp64; the Triton kernel three ways.

Without a GPU the kernel runs in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, needs_triton
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.decode_window import decode_window
from ltconvert.kernels.parity import check, judge

# batch, query heads, key/value heads, slots, width
SHAPES = [(3, 4, 2, 5, 12), (1, 1, 1, 1, 2), (2, 3, 3, 40, 16)]
if GPU:
    SHAPES += [(1, 16, 16, 512, 128), (8, 16, 16, 512, 128), (2, 8, 4, 1000, 256)]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_triton)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests(request.param))
    return request.param


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What stands behind a length is NaN; rest is a column of something wider."""
    batch, heads, groups, slots, width = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(DEVICE, dtype)

    lengths = torch.randint(1, slots + 1, (batch,), generator=generator).to(DEVICE, torch.int32)
    behind = torch.arange(slots, device=DEVICE) >= lengths[:, None]
    keys, values = (
        normal(batch, groups, slots, width).masked_fill(behind[:, None, :, None], torch.nan)
        for _ in range(2)
    )
    return {
        "q_BHD": normal(batch, heads, width),
        "k_BGSD": keys,
        "v_BGSD": values,
        "lengths_B": lengths,
        "other_BHD": normal(batch, heads, width),
        "rest_BH": 2 * normal(batch, heads + 3)[:, 1:-2],
        "outside_B": (torch.arange(batch) % 3 != 1).to(DEVICE),
        "scale": width**-0.5,
    }


def definition(given: dict[str, Any], work: torch.dtype, cap: float | None) -> dict[str, Tensor]:
    i = {
        k: v.to(work) if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in given.items()
    }
    batch, heads, _ = i["q_BHD"].shape
    group = heads // i["k_BGSD"].shape[1]
    y = torch.empty_like(i["q_BHD"])
    for b in range(batch):
        for h in range(heads):
            keys, values = (i[n][b, h // group, : i["lengths_B"][b]] for n in ("k_BGSD", "v_BGSD"))
            scores = keys @ i["q_BHD"][b, h] * i["scale"]
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            inside, outside = scores.exp(), i["rest_BH"][b, h].exp() * i["outside_B"][b]
            y[b, h] = inside @ values + outside * i["other_BHD"][b, h]
            y[b, h] /= inside.sum() + outside
    return {"y": y}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_softmax_over_the_window_and_the_rest(
    backend: str, shape: tuple[int, ...], cap: float | None, dtype: torch.dtype
) -> None:
    given = inputs(shape, dtype)
    truth, plain = (definition(given, work, cap) for work in (torch.float64, dtype))
    found = decode_window(**given, soft_cap=cap)
    assert found.dtype == dtype
    check(judge(truth, plain, {"y": found}, dtype))


def test_fp64_in_the_reference() -> None:
    given = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs(SHAPES[0]).items()
    }
    with dispatch.use("reference"):
        found = decode_window(**given)
    torch.testing.assert_close(found, definition(given, torch.float64, None)["y"])


def test_wrong_arguments_are_named() -> None:
    given = inputs(SHAPES[0])
    with pytest.raises(ValueError, match=r"rest \[3, heads\].*\[3, 3\]"):
        decode_window(**(given | {"rest_BH": given["rest_BH"][:, 1:]}))
    with pytest.raises(ValueError, match="outside must be boolean"):
        decode_window(**(given | {"outside_B": given["lengths_B"]}))
    with pytest.raises(ValueError, match="no gradient"):
        decode_window(**(given | {"q_BHD": given["q_BHD"].requires_grad_()}))
