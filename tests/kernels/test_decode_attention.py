"""decode_attention against a loop over rows and heads in fp64; the Triton kernels three ways.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, attention_by, needs_triton
from heads_case import attention_of
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.decode_attention import (
    decode_attention,
    decode_attention_with_sum,
)
from ltconvert.kernels.parity import check, judge

# batch, query heads, key/value heads, slots, width
SHAPES = [
    (1, 1, 1, 1, 1), (3, 2, 2, 45, 16), (2, 3, 3, 37, 40), (2, 3, 1, 150, 20),
    (2, 8, 2, 130, 16), (2, 34, 2, 70, 16),
]  # fmt: skip
if GPU:
    SHAPES += [
        (1, 16, 16, 4096, 128), (8, 16, 16, 777, 128), (2, 32, 8, 2049, 128), (3, 9, 3, 515, 64),
        (2, 8, 4, 1031, 256), (70, 16, 16, 99, 80), (1, 4, 4, 301, 256), (1, 12, 1, 5000, 96),
    ]  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = DEVICE
) -> dict[str, Any]:
    """Random ones. The first row has one key, the last fills the cache; slots behind hold NaN."""
    batch, heads, groups, slots, width = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    lengths = torch.randint(1, slots + 1, (batch,), generator=generator)
    lengths[0], lengths[-1] = 1, slots
    k, v = normal(batch, groups, slots, width), normal(batch, groups, slots, width)
    for row, length in enumerate(lengths.tolist()):
        k[row, :, length:] = v[row, :, length:] = torch.nan
    q = normal(batch, heads, width)
    return {"q_BHD": q, "k_BGSD": k, "v_BGSD": v, "lengths_B": lengths.to(device)}


@pytest.fixture(params=["reference", pytest.param("triton", marks=needs_triton)])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with attention_by(request.param, monkeypatch):
        yield request.param


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_value(
    backend: str, shape: tuple[int, ...], dtype: torch.dtype, soft_cap: float | None
) -> None:
    options = {"scale": 1.5 * shape[-1] ** -0.5, "soft_cap": soft_cap}
    given = inputs(shape, dtype)
    truth, plain = (attention_of(given, work, **options) for work in (torch.float64, dtype))
    found = decode_attention(**given, **options)
    assert found.dtype == dtype and found.is_contiguous()
    check(judge(truth, plain, {"o": found}, dtype))
    short = {**given, "lengths_B": given["lengths_B"].int()}
    assert torch.equal(decode_attention(**short, **options), found)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3]])
def test_the_log_of_the_weights_sum(
    backend: str, shape: tuple[int, ...], soft_cap: float | None
) -> None:
    given, group = inputs(shape), shape[1] // shape[2]
    options = {"scale": 0.7, "soft_cap": soft_cap}
    o, log_sum = decode_attention_with_sum(**given, **options)
    torch.testing.assert_close(o, decode_attention(**given, **options))
    q, k = given["q_BHD"].double(), given["k_BGSD"].double()
    for b, length in enumerate(given["lengths_B"].tolist()):
        for h in range(shape[1]):
            scores = 0.7 * k[b, h // group, :length] @ q[b, h]
            scores = scores if soft_cap is None else soft_cap * (scores / soft_cap).tanh()
            torch.testing.assert_close(log_sum[b, h], scores.exp().sum().log().float())


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("shape", [(2, 2, 2, 90, 16), (2, 6, 2, 90, 16)])
def test_any_number_of_parts(
    backend: str, shape: tuple[int, ...], parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "triton":
        from ltconvert.kernels.decode_attention import triton

        monkeypatch.setattr(triton, "_parts", lambda *sizes: parts)
    given = inputs(shape)
    for name in ("k_BGSD", "v_BGSD"):
        given[name].nan_to_num_()
    for length in (1, 16, 17, 64, 90):
        given["lengths_B"][:] = length
        want = attention_of(given, torch.float64, scale=0.3)["o"].float()
        torch.testing.assert_close(decode_attention(**given, scale=0.3), want)


def test_fp64_in_the_reference() -> None:
    given = inputs(SHAPES[3], torch.float64, "cpu")
    with dispatch.use("reference"):
        found = decode_attention(**given, scale=0.3, soft_cap=3.0)
    want = attention_of(given, torch.float64, scale=0.3, soft_cap=3.0)["o"]
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]])
def test_caches_may_have_any_strides_but_the_last(backend: str, shape: tuple[int, ...]) -> None:
    given = inputs(shape, DTYPES[-1])
    want = decode_attention(**given, scale=0.3)
    batch, heads, groups, slots, width = shape
    tokens_first = torch.full((batch, slots, 2, groups, width + 3), torch.nan, device=DEVICE)
    tokens_first = tokens_first.to(DTYPES[-1])
    k, v = (x.transpose(1, 2) for x in tokens_first[..., 1 : width + 1].unbind(2))
    k.copy_(given["k_BGSD"])
    v.copy_(given["v_BGSD"])
    q = torch.zeros(batch, width, heads, device=DEVICE, dtype=DTYPES[-1]).mT
    q.copy_(given["q_BHD"])
    lengths = given["lengths_B"].repeat_interleave(2)[::2]
    torch.testing.assert_close(decode_attention(q, k, v, lengths, scale=0.3), want)


def test_one_key_is_its_value_and_equal_keys_are_the_mean(backend: str) -> None:
    given = inputs((2, 4, 2, 40, 16))
    given["lengths_B"][:] = 1
    found = decode_attention(**given, scale=7.0)
    torch.testing.assert_close(found, given["v_BGSD"][:, :, 0].repeat_interleave(2, 1))
    given["lengths_B"][:] = 33
    v = torch.randn(2, 2, 40, 16, device=DEVICE)
    found = decode_attention(given["q_BHD"], torch.ones_like(v), v, given["lengths_B"], scale=7.0)
    torch.testing.assert_close(found, v[:, :, :33].mean(2).repeat_interleave(2, 1))


@pytest.mark.parametrize("heads", [2, 6])
def test_lengths_out_of_range(backend: str, heads: int) -> None:
    """They cannot be refused without waiting for the device; nothing is read outside the cache."""
    given = inputs((3, heads, 2, 40, 16))
    given["k_BGSD"].nan_to_num_()
    given["v_BGSD"].nan_to_num_()
    given["lengths_B"] = torch.tensor([10**12, 0, -3], device=DEVICE)
    found = decode_attention(**given, scale=0.3)
    given["lengths_B"] = torch.tensor([40, 1, 1], device=DEVICE)
    assert torch.equal(found[0], decode_attention(**given, scale=0.3)[0])
    assert found[1:].isnan().all()


@pytest.mark.parametrize("heads", [2, 6])
def test_scores_far_apart_and_far_from_zero(backend: str, heads: int) -> None:
    given = inputs((1, heads, 2, 50, 16))
    given["q_BHD"] *= 100.0
    found = decode_attention(**given, scale=30.0)
    torch.testing.assert_close(
        found.double(), attention_of(given, torch.float64, scale=30.0)["o"], rtol=1e-3, atol=1e-3
    )
    far = -torch.randint(1, 5, given["q_BHD"].shape, device=DEVICE).float()  # sums are exact
    same = {**given, "k_BGSD": torch.full_like(given["k_BGSD"], 2.0**20), "q_BHD": far}
    found = decode_attention(**same, scale=1.0)
    mean = given["v_BGSD"].mean(2).repeat_interleave(heads // 2, 1)
    torch.testing.assert_close(found, mean, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[4]])
def test_runs_repeat(backend: str, shape: tuple[int, ...]) -> None:
    given = inputs(shape, DTYPES[-1])
    want = decode_attention(**given, scale=0.3, soft_cap=5.0)
    assert torch.equal(decode_attention(**given, scale=0.3, soft_cap=5.0), want)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("groups", [4, 16])
def test_a_cuda_graph_sees_lengths_change(groups: int) -> None:
    given = inputs((2, 16, groups, 1500, 128), torch.bfloat16)
    given["k_BGSD"].nan_to_num_()
    given["v_BGSD"].nan_to_num_()
    decode_attention(**given, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode_attention(**given, scale=0.1)
    for lengths in ((1, 2), (700, 64), (1500, 1499)):
        given["lengths_B"].copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(o, decode_attention(**given, scale=0.1))
        truth = attention_of(given, torch.float64, scale=0.1)
        check(
            judge(truth, attention_of(given, torch.bfloat16, scale=0.1), {"o": o}, torch.bfloat16)
        )


def test_no_rows(backend: str) -> None:
    given = {name: value[:0] for name, value in inputs(SHAPES[1]).items()}
    assert decode_attention(**given, scale=0.3).shape == (0, 2, 16)


def test_parts_follow_sizes_alone() -> None:
    pytest.importorskip("triton")
    from ltconvert.kernels.decode_attention import triton

    sizes = {"slots": 4096, "width": 128, "full": False, "multiprocessors": 132}
    for batch, heads, groups in ((1, 16, 16), (8, 16, 16), (1, 32, 8), (1, 71, 1), (300, 16, 16)):
        plan = triton._plan(batch, heads, groups, **sizes)
        most = 132 * triton.RESIDENT["grouped" if plan.grouped else "single"]
        assert plan.grouped == (heads != groups)
        assert plan.parts == 1 or 0.75 * most < plan.programs < 1.5 * most
    assert triton._plan(1, 16, 16, **{**sizes, "slots": 31}).parts == 1


def test_wrong_arguments_are_named() -> None:
    given = inputs(SHAPES[4])
    for name, wrong, match in (
        ("q_BHD", given["q_BHD"][..., 1:], r"q must be \[2, heads, 16\]"),
        ("v_BGSD", given["v_BGSD"][:, :1], r"values as keys"),
        ("lengths_B", given["lengths_B"][:1], r"lengths \[2\]"),
        ("q_BHD", given["q_BHD"][:, 1:], r"multiple .* 7 and 2 heads"),
        ("q_BHD", given["q_BHD"].double(), r"one dtype, got torch.float64, torch.float32"),
        ("lengths_B", given["lengths_B"].float(), r"int32 or int64, got torch.float32"),
    ):
        with pytest.raises(ValueError, match=match):
            decode_attention(**{**given, name: wrong}, scale=1.0)
    with pytest.raises(ValueError, match="soft_cap must be positive or None, got 0"):
        decode_attention(**given, scale=1.0, soft_cap=0.0)
    none = given["k_BGSD"][:, :, :0]
    with pytest.raises(ValueError, match="0 slots"):
        decode_attention(**{**given, "k_BGSD": none, "v_BGSD": none}, scale=1.0)


def test_a_gradient_is_refused() -> None:
    given = inputs(SHAPES[1])
    given["q_BHD"].requires_grad_()
    with pytest.raises(ValueError, match="decode_attention has no gradient"):
        decode_attention(**given, scale=1.0)
    with torch.no_grad():
        decode_attention(**given, scale=1.0)


@needs_triton
def test_what_the_kernel_does_not_take_names_the_reference() -> None:
    double, wide = inputs(SHAPES[1], torch.float64), inputs((1, 1, 1, 3, 257))
    turned = inputs(SHAPES[1])
    turned["k_BGSD"] = turned["k_BGSD"].mT.contiguous().mT
    for given, match in (
        (double, "in fp32, got fp64"),
        (wide, "up to 256 wide, got 257"),
        (turned, "side by side"),
    ):
        with dispatch.use("triton"), pytest.raises(ValueError, match=rf"{match}.*reference"):
            decode_attention(**given, scale=1.0)
        with dispatch.use("auto"):
            decode_attention(**given, scale=1.0)
