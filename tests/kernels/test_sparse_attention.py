"""sparse_attention against attention over a mask in fp64; the Triton kernels three ways.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, needs_triton
from helpers import covering
from sparse_case import KINDS, Shape, dense, problem
from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.parity import check, judge
from ltconvert.kernels.sparse_attention import reference, seen, sparse_attention
from ltconvert.kernels.sparse_attention.bits import pack, union, unpack
from ltconvert.kernels.sparse_attention.tiles import Sizes, lists, met

SHAPES = [Shape(2, 4, 2, 2, 21, 21, 12), Shape(1, 3, 3, 1, 1, 1, 4), Shape(2, 4, 1, 4, 7, 19, 5)]
if GPU:
    SHAPES += [
        Shape(2, 8, 8, 1, 515, 515, 128), Shape(1, 8, 2, 2, 300, 1031, 64),
        Shape(1, 4, 2, 4, 257, 257, 256), Shape(3, 6, 2, 2, 1, 2049, 80),
    ]  # fmt: skip
else:
    SHAPES += [Shape(1, 2, 1, 2, 40, 70, 16)]
BACKENDS = ["reference", pytest.param("triton", marks=needs_triton)]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend asked for; on a CPU chunks and blocks so small that there are several."""
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests(request.param))
    if not GPU:
        monkeypatch.setattr(seen, "MOST_SCORES", 700)
    if request.param == "triton" and not GPU:
        from ltconvert.kernels.sparse_attention import triton

        monkeypatch.setattr(triton, "TILE", (16, 32))
        monkeypatch.setattr(triton, "LEAST_WIDTH", 16)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "kind", "soft_cap"), covering(SHAPES, KINDS, [None, 2.0]))
def test_value_and_gradients(
    backend: str, shape: Shape, kind: str, dtype: torch.dtype, soft_cap: float | None
) -> None:
    leaves, others, mask = problem(kind, shape, dtype)
    if backend == "triton" and limits.of_sparse_attention(leaves["q_BHTD"].to(dtype)):
        pytest.skip("no kernel")
    options = {"scale": 1.5 * shape.width**-0.5, "soft_cap": soft_cap}
    truth = results(leaves, mask, None, torch.float64, **options)
    plain = results(leaves, mask, None, dtype, **options)
    check(judge(truth, plain, results(leaves, mask, others, dtype, **options), dtype))
    assert "o" in truth


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2])
def test_without_causal_order_bits_alone_count(
    backend: str, groups: int, dtype: torch.dtype
) -> None:
    """Keys that stand for blocks: fewer than queries, and none is seen by some of them."""
    leaves, _, _ = problem("all", Shape(2, 4, groups, 1, 37, 37, 12), dtype)
    leaves = {name: x if name[0] == "q" else x[:, :, :9] for name, x in leaves.items()}
    mask = torch.rand(2, groups, 37, 9, generator=torch.Generator().manual_seed(1)) < 0.2
    others = {"bits_BJTW": pack(mask).to(DEVICE), "causal": False}
    mask = mask.to(DEVICE)
    truth = results(leaves, mask, None, torch.float64, scale=0.4)
    plain = results(leaves, mask, None, dtype, scale=0.4)
    check(judge(truth, plain, results(leaves, mask, others, dtype, scale=0.4), dtype))
    assert not mask.any(-1).all()
    with pytest.raises(ValueError, match="without causal order bits alone"):
        sparse_attention(**leaves, scale=1.0, causal=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tile", [(16, 32), (3, 64)])
def test_lists_hold_every_tile_with_something_to_see(kind: str, tile: tuple[int, int]) -> None:
    shape = Shape(2, 4, 2, 2, 90, 150, 4)
    _, others, mask = problem(kind, shape, device="cpu")
    sizes = Sizes(90, 150, *tile)
    given = (others.get(name) for name in ("first_BT", "bits_BJTW", "block_BS"))
    found = met(sizes, *given, True, torch.device("cpu"))
    (of_queries, of_keys), (count_q, count_k) = lists(found), sizes.tiles
    for b, j, q in itertools.product(range(2), range(mask.shape[1]), range(count_q)):
        at = min(b, len(found) - 1), min(j, found.shape[1] - 1)
        listed = of_queries.order[at][q, : of_queries.counts[at][q]].tolist()
        rows = mask[b, j, tile[0] * q : tile[0] * (q + 1)]
        needed = {k for k in range(count_k) if rows[:, tile[1] * k : tile[1] * (k + 1)].any()}
        assert needed <= set(listed) and sorted(listed) == listed
        if kind in ("all", "window", "documents"):  # bits of later keys may list a tile too many
            assert needed == set(listed)
        assert all(q in of_keys.order[at][k, : of_keys.counts[at][k]] for k in listed)


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
    cpu = torch.device("cpu")
    assert seen.chunks(5, 10**9, cpu) == [(t, t + 1) for t in range(5)]
    assert seen.chunks(5, 1, cpu) == [(0, 5)]
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
