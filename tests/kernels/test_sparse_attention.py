"""sparse_attention against attention over a mask in fp64; the Triton kernels three ways.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU
from sparse_case import KINDS, Shape, dense, problem
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.parity import check, judge
from ltconvert.kernels.sparse_attention import reference, seen, sparse_attention
from ltconvert.kernels.sparse_attention.bits import pack, union, unpack

SHAPES = [Shape(2, 4, 2, 2, 21, 21, 12), Shape(1, 3, 3, 1, 1, 1, 4), Shape(2, 4, 1, 4, 7, 19, 5)]
BACKENDS = ["reference"]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend asked for; on a CPU chunks and blocks so small that there are several."""
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests(request.param))
    if not GPU:
        monkeypatch.setattr(seen, "MOST_SCORES", 700)
    yield request.param


def results(
    leaves: dict[str, Tensor],
    mask: Tensor,
    others: dict[str, Any],
    dtype: torch.dtype,
    **options: Any,
) -> dict[str, Tensor]:
    """Outputs and all gradients, of ``dense`` if a mask is given; what is -inf as 0."""
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in leaves.items()}
    if others is None:
        o, log_sum = dense(inputs, mask, **options)
    else:
        o, log_sum = sparse_attention(**inputs, **others, **options)
    none = ~mask.any(-1).expand(log_sum.shape[0], -1, -1)
    none = none.repeat_interleave(log_sum.shape[1] // none.shape[1], 1)
    assert (log_sum[none] == float("-inf")).all() and log_sum[~none].isfinite().all()
    log_sum = log_sum.masked_fill(none, 0.0)
    g = torch.Generator().manual_seed(3)
    do, dlog = (torch.randn(x.shape, generator=g).to(x.device, x.dtype) for x in (o, log_sum))
    grads = torch.autograd.grad((o * do).sum() + (log_sum * dlog).sum(), list(inputs.values()))
    named = {f"d{name}": x for name, x in zip(inputs, grads, strict=True)}
    return {"o": o.detach(), "log_sum": log_sum.detach(), **named}


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients(
    backend: str, shape: Shape, kind: str, dtype: torch.dtype, soft_cap: float | None
) -> None:
    leaves, others, mask = problem(kind, shape, dtype)
    options = {"scale": 1.5 * shape.width**-0.5, "soft_cap": soft_cap}
    truth = results(leaves, mask, None, torch.float64, **options)
    plain = results(leaves, mask, None, dtype, **options)
    check(judge(truth, plain, results(leaves, mask, others, dtype, **options), dtype))
    assert "o" in truth


@pytest.mark.parametrize("kind", KINDS)
def test_fp64_in_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "MOST_SCORES", 300)
    leaves, others, mask = problem(kind, SHAPES[0], torch.float64, "cpu")
    with dispatch.use("reference"):
        found = results(leaves, mask, others, torch.float64, scale=0.4, soft_cap=3.0)
    truth = results(leaves, mask, None, torch.float64, scale=0.4, soft_cap=3.0)
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_runs_repeat(backend: str) -> None:
    leaves, others, mask = problem("both", SHAPES[0], DTYPES[-1])
    runs = [results(leaves, mask, others, DTYPES[-1], scale=0.3) for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_bits_are_a_set_and_back() -> None:
    g = torch.Generator().manual_seed(0)
    for size in (1, 31, 32, 33, 100):
        mask = torch.rand(3, 5, size, generator=g) < 0.5
        words = pack(mask)
        assert words.dtype == torch.int32 and words.shape == (3, 5, (size + 31) // 32)
        assert torch.equal(unpack(words, size), mask)
        assert torch.equal(unpack(union(words, 1), size), mask.any(1))
    assert pack(torch.ones(32, dtype=torch.bool)).tolist() == [-1]


def test_chunks_are_whole_and_bounded() -> None:
    assert seen.chunks(5, 10**9) == [(t, t + 1) for t in range(5)]
    assert seen.chunks(5, 1) == [(0, 5)]
    assert reference._chunks(torch.empty(2, 4, 9, 8), torch.empty(2, 2, 9, 8)) == [(0, 9)]


def test_wrong_arguments_are_named() -> None:
    leaves, others, _ = problem("blocks", SHAPES[0])
    given = leaves | others | {"first_BT": torch.zeros(1, 21, dtype=torch.int32, device=DEVICE)}
    for name, wrong, match in (
        ("k_BGSD", leaves["k_BGSD"][..., 1:], r"keys and values must be \[2, groups, keys, 12\]"),
        ("v_BGSD", leaves["v_BGSD"].double(), "one dtype"),
        ("q_BHTD", leaves["q_BHTD"][:, 1:], "3 and 2 heads"),
        ("first_BT", torch.zeros(2, 20, dtype=torch.int32), r"first must be .*\[2 or 1, 21\]"),
        ("first_BT", torch.zeros(2, 21), r"int32 or int64"),
        ("keep_BS", torch.ones(2, 20), r"keep must be \[2, 21\]"),
        ("bits_BJTW", others["bits_BJTW"].long(), r"bits must be int32"),
        ("bits_BJTW", others["bits_BJTW"][:, :, 1:], r"bits must be int32"),
        ("block_BS", others["block_BS"][:, 1:], r"block must be .*\[2, 21\]"),
        ("bits_BJTW", None, "blocks without bits"),
        ("soft_cap", -1.0, "soft_cap must be positive or None"),
    ):
        with pytest.raises(ValueError, match=match):
            sparse_attention(**{**given, name: wrong}, scale=1.0)
