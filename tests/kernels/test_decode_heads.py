"""What stands between a decoded token's projections: against the layer's own modules, in fp64.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, needs_triton
from heads_case import EPS, OFFSET, heads_of, token
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.decode_heads import decode_heads
from ltconvert.kernels.decode_norm import decode_norm, decode_norms
from ltconvert.kernels.parity import check, judge

# batch, query heads, key/value heads, slots, width
SHAPES = [(3, 4, 2, 5, 12), (1, 1, 1, 1, 2), (2, 3, 3, 4, 16)]
if GPU:
    SHAPES += [(1, 16, 16, 64, 128), (8, 32, 8, 64, 128), (2, 8, 4, 33, 256)]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_triton)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests(request.param))
    return request.param


def run(given: dict[str, Any], **more: Any) -> dict[str, Tensor]:
    given = {k: v.clone() if k in ("keys_BGSD", "values_BGSD") else v for k, v in given.items()}
    q = decode_heads(**given, **more)
    return {"q": q, "keys": given["keys_BGSD"], "values": given["values_BGSD"]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", [False, True], ids=["plain", "rope"])
@pytest.mark.parametrize("norm", ["none", "head", "full"])
@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_cache(
    backend: str, shape: tuple[int, ...], norm: str, rope: bool, dtype: torch.dtype
) -> None:
    given = token(shape, norm, rope, dtype)
    truth, plain = heads_of(given, torch.float64), heads_of(given, dtype)
    check(judge(truth, plain, run(given), dtype))


def test_queries_keys_and_values_may_go_into_one_row(backend: str) -> None:
    """As the linear mixers want them back."""
    given = token((2, 3, 3, 1, 16), "full", False)
    want = heads_of(given, torch.float64)
    buffer = torch.empty(2, 3, 3, 16, device=DEVICE)
    q, k, v = buffer.unbind(1)
    given |= {"keys_BGSD": k[:, :, None], "values_BGSD": v[:, :, None]}
    decode_heads(**given, out_BHD=q)
    found = torch.stack([want["q"], want["keys"][:, :, 0], want["values"][:, :, 0]], dim=1)
    torch.testing.assert_close(buffer.double(), found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True], ids=["norm", "residual"])
@pytest.mark.parametrize("size", [(3, 7), (1, 2048), (8, 5000) if GPU else (2, 3000)])
def test_norm_and_residual(
    backend: str, size: tuple[int, int], residual: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(sum(size))
    x, weight, h = (
        torch.randn(n, generator=generator).to(DEVICE, dtype) for n in (size, size[1:], size)
    )
    results = []
    for work in (torch.float64, dtype):
        y = x.to(work) / (x.to(work).square().mean(-1, keepdim=True) + EPS).sqrt()
        y = y * (weight.to(work) + OFFSET)
        results.append({"y": y + h.to(work) if residual else y})
    h = h if residual else None
    found = decode_norm(x, weight, h, eps=EPS, offset=OFFSET)
    assert found.dtype == dtype
    check(judge(*results, {"y": found}, dtype))
    next_weight = torch.randn(size[1:], generator=generator).to(DEVICE, dtype)
    how = {"eps": EPS, "offset": OFFSET, "next_eps": 0.5, "next_offset": -1.0}
    y, z = decode_norms(x, weight, h, next_weight, **how)
    assert y.dtype == z.dtype == dtype
    check(judge(*results, {"y": y}, dtype))
    results = []
    for work in (torch.float64, dtype):  # of what is stored
        z_of_y = y.to(work) / (y.to(work).square().mean(-1, keepdim=True) + 0.5).sqrt()
        results.append({"z": z_of_y * (next_weight.to(work) - 1.0)})
    check(judge(*results, {"z": z}, dtype))


@pytest.mark.parametrize("left", [0.0, 1e-4, 1e-2, 0.1])
def test_a_norm_of_what_cancels(backend: str, left: float) -> None:
    """The stream loses all but a share ``left`` of itself: its size is still right."""
    generator = torch.Generator().manual_seed(3)
    x, noise = (torch.randn(2, 256, generator=generator).to(DEVICE) for _ in range(2))
    weight, next_weight = (torch.rand(256, generator=generator).to(DEVICE) + 0.5 for _ in range(2))
    h = left * noise - decode_norm(x, weight, eps=EPS)
    how = {"eps": EPS, "offset": 0.0, "next_eps": 1e-12, "next_offset": 0.0}
    y, z = decode_norms(x, weight, h, next_weight, **how)
    work = y.double()
    want = work / (work.square().mean(-1, keepdim=True) + 1e-12).sqrt() * next_weight.double()
    torch.testing.assert_close(z.double(), want, atol=2e-4, rtol=2e-4)


def test_fp64_in_the_reference() -> None:
    given = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in token(SHAPES[0], "head", True).items()
    }
    with dispatch.use("reference"):
        found = run(given)
    torch.testing.assert_close(found, heads_of(given, torch.float64))


def test_wrong_arguments_are_named() -> None:
    given = token(SHAPES[0], "head", True)
    for changed, message in (
        ({"num_heads": 3}, r"qkv must be \[3, 84\]"),
        ({"cos_BD": None}, "go together"),
        ({"cos_BD": given["cos_BD"][:, 1:]}, r"must be \[3, 12\]"),
        ({"q_norm_weight": given["q_norm_weight"][1:]}, "48 and 24; got 11 and 12"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_heads(**(given | changed))
    x, weight = torch.zeros(2, 3, device=DEVICE), torch.zeros(3, device=DEVICE)
    with pytest.raises(ValueError, match=r"\[2, 3\], got \[2\] and None"):
        decode_norm(x, weight[:2], eps=EPS)
    how = {"eps": EPS, "offset": 0.0, "next_eps": EPS, "next_offset": 0.0}
    with pytest.raises(ValueError, match=r"\[2, 3\], got \[3\], \[2\] and None"):
        decode_norms(x, weight, None, weight[:2], **how)
    with pytest.raises(ValueError, match="no gradient"):
        decode_norm(x.requires_grad_(), weight, eps=EPS)
