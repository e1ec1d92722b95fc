"""The indexer's choice and its loss, against one query at a time and autograd in fp64.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from decode_case import DEVICE, DTYPES, GPU, needs_triton
from helpers import covering
from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.index_kl import index_kl
from ltconvert.kernels.index_topk import decode_topk, index_topk
from ltconvert.kernels.parity import check, judge
from ltconvert.kernels.sparse_attention import seen
from ltconvert.kernels.sparse_attention.bits import unpack

B, HEADS, WIDTH = 2, 3, 6
BACKENDS = ["reference", pytest.param("triton", marks=needs_triton)]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend asked for, chunks so small that there are several."""
    only = {"index_topk": request.param, "index_kl": request.param}
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests("auto", only))
    monkeypatch.setattr(seen, "MOST_SCORES", 500)
    if request.param == "triton" and not GPU:
        from ltconvert.kernels.index_kl import triton as loss
        from ltconvert.kernels.index_topk import triton as choice

        monkeypatch.setattr(choice, "TILE", (16, 16))
        monkeypatch.setattr(loss, "TILE", (16, 32))
        for module in (choice, loss):
            monkeypatch.setattr(module, "LEAST_WIDTH", 16)
    yield request.param


def indexer(
    length: int,
    keys: int,
    dtype: torch.dtype = torch.float32,
    heads: int = HEADS,
    width: int = WIDTH,
) -> list[Tensor]:
    """Queries, keys and weights; every fourth query has no positive product, so that all tie."""
    g = torch.Generator().manual_seed(length)
    q = torch.randn(B, length, heads, width, generator=g)
    k, weight = torch.randn(B, keys, width, generator=g), torch.randn(B, length, heads, generator=g)
    k[..., 0] = k[..., 0].abs() + 0.1
    q[:, ::4] = 0.0
    q[:, ::4, :, 0] = -1.0
    return [x.to(DEVICE, dtype) for x in (q, k, weight)]


def reach(kind: str, length: int, keys: int) -> tuple[dict[str, Any], Tensor]:
    """Arguments, and which keys take part, [B, T, S]."""
    g = torch.Generator().manual_seed(7)
    columns, at = torch.arange(keys - length, keys), torch.arange(keys)
    seen_BTS = (at <= columns[:, None]).expand(B, -1, -1)
    given: dict[str, Any] = {}
    if kind in ("window", "padded"):
        given["first_BT"] = (columns - 7).clamp(min=0)[None].expand(B, -1)
        seen_BTS = seen_BTS & (at > columns[:, None] - 8)
    if kind == "documents":
        starts = torch.rand(B, length, generator=g) < 0.2
        given["first_BT"] = (starts * columns).cummax(-1).values.int()
        seen_BTS = seen_BTS & (at >= given["first_BT"][..., None])
    if kind == "padded":
        given["keep_BS"] = torch.rand(B, keys, generator=g) < 0.6
        seen_BTS = seen_BTS & (given["keep_BS"][:, None] | (at == columns[:, None]))
    return {name: x.to(DEVICE) for name, x in given.items()}, seen_BTS.to(DEVICE)


def by_definition(q: Tensor, k: Tensor, weight: Tensor, seen_BTS: Tensor, count: int) -> Tensor:
    """Whether each key is chosen [B, T, S]: sorted by score, later keys first among equals."""
    chosen = torch.zeros_like(seen_BTS)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            score = [
                float(sum(w * max(0.0, float(x @ key)) for w, x in zip(weight[b, t], q[b, t])))  # noqa: B905
                for key in k[b]
            ]
            allowed = [s for s in range(k.shape[1]) if seen_BTS[b, t, s]]
            best = sorted(allowed, key=lambda s: (score[s], s), reverse=True)[:count]
            chosen[b, t, best] = True
    return chosen


@pytest.mark.parametrize(
    ("shape", "kind", "count"),
    covering([(17, 17), (1, 1), (5, 20), (1, 40)], ["all", "window", "padded"], [1, 4, 100]),
    ids=str,
)
def test_the_best_keys_are_chosen(
    backend: str, shape: tuple[int, int], kind: str, count: int
) -> None:
    length, keys = shape
    given, seen_BTS = reach(kind, length, keys)
    q, k, weight = indexer(length, keys)
    bits = index_topk(q, k, weight, count, **given)
    assert bits.shape[:3] == (B, 1, length)
    wanted = by_definition(*(x.double() for x in (q, k, weight)), seen_BTS, count)
    assert torch.equal(unpack(bits[:, 0], keys), wanted)


@pytest.mark.parametrize("kind", ["all", "padded"])
def test_more_keys_than_fit_into_registers(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "triton":
        from ltconvert.kernels.index_topk import triton

        monkeypatch.setattr(triton, "MOST_KEYS", 16)
        monkeypatch.setattr(triton, "WORDS_AT_A_TIME", 1)
    test_the_best_keys_are_chosen(backend, (5, 40), kind, 4)


@pytest.mark.parametrize("window", [None, 6])
def test_one_token_chooses_the_same_among_slots(window: int | None) -> None:
    q, k, weight = indexer(1, 30)
    lengths = torch.tensor([30, 3], device=DEVICE)
    found = decode_topk(q[:, 0], k, weight[:, 0], 5, lengths, window)
    for row, length in enumerate(lengths.tolist()):
        first = max(0, length - (window or length))
        part = torch.zeros(1, 1, 30, dtype=torch.bool)
        part[..., first:length] = True
        given = (x[row : row + 1].double().cpu() for x in (q, k, weight))
        wanted = by_definition(*given, part, 5)[0, 0].nonzero().flatten().tolist()
        assert sorted(found[row, : min(5, length)].tolist()) == wanted


class Shape(NamedTuple):
    """Queries, keys; heads, key/value heads, width of attention; heads, width of the indexer."""

    length: int
    keys: int
    heads: int
    groups: int
    width: int
    index_heads: int
    index_width: int


SHAPES = [Shape(9, 44, 4, 2, 5, 3, 6), Shape(37, 37, 3, 3, 17, 1, 20)]
if GPU:
    SHAPES += [Shape(257, 515, 9, 3, 64, 4, 64), Shape(130, 130, 8, 1, 128, 2, 80)]


def losses(
    shape: Shape, kind: str, count: int | None, cap: float | None, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Loss and gradients: in fp64, in plain PyTorch (fp32 at least), and of ``index_kl``."""
    given, seen_BTS = reach(kind, shape.length, shape.keys)
    index = indexer(shape.length, shape.keys, dtype, *shape[5:])
    g = torch.Generator().manual_seed(1)
    q = torch.randn(B, shape.heads, shape.length, shape.width, generator=g).to(DEVICE, dtype)
    k = torch.randn(B, shape.groups, shape.keys, shape.width, generator=g).to(DEVICE, dtype)
    bits = None
    if count is not None:
        bits = index_topk(*index, count, **given)
        seen_BTS = unpack(bits[:, 0], shape.keys)
    scale = 2.0 * shape.width**-0.5

    def of_op(index: list[Tensor]) -> Tensor:
        return index_kl(*index, q, k, scale=scale, soft_cap=cap, bits_BJTW=bits, **given)

    def by_definition(index: list[Tensor]) -> Tensor:
        queries, keys = (x.to(index[0].dtype) for x in (q, k))
        scores = scale * queries @ keys.repeat_interleave(shape.heads // shape.groups, 1).mT
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        p = scores.masked_fill(~seen_BTS[:, None], float("-inf")).softmax(-1).mean(1)
        score = torch.einsum("bti,btis->bts", index[2], (index[0] @ index[1][:, None].mT).relu())
        log_q = score.masked_fill(~seen_BTS, float("-inf")).log_softmax(-1)
        kl_BT = (torch.special.xlogy(p, p) - p * log_q.masked_fill(~seen_BTS, 0.0)).sum(-1)
        keep = given.get("keep_BS")
        return kl_BT.mean() if keep is None else kl_BT[keep[:, -shape.length :]].mean()

    found = []
    wide = torch.promote_types(dtype, torch.float32)
    for loss, working in ((by_definition, torch.float64), (by_definition, wide), (of_op, dtype)):
        leaves = [x.to(working).requires_grad_() for x in index]
        value = loss(leaves)
        grads = torch.autograd.grad(2.0 * value, leaves)
        found.append(dict(zip(("loss", "dq", "dk", "dweight"), (value.detach(), *grads))))  # noqa: B905
    return found


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize(
    ("shape", "kind", "count", "cap"),
    covering(SHAPES, ["all", "window", "documents", "padded"], [None, 3], [None, 2.0]),
)
def test_the_loss_and_its_gradients(
    backend: str,
    shape: Shape,
    kind: str,
    count: int | None,
    cap: float | None,
    dtype: torch.dtype,
) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("no kernel")
    check(judge(*losses(shape, kind, count, cap, dtype), dtype))


def test_the_loss_repeats(backend: str) -> None:
    runs = [losses(SHAPES[0], "all", None, None, DTYPES[-1])[-1] for _ in range(2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [None, 256])
@pytest.mark.parametrize("kind", ["all", "documents", "padded"])
def test_the_loss_at_the_shape_of_a_model(kind: str, count: int | None) -> None:
    shape = Shape(2000, 2048, 9, 3, 64, 4, 64)
    with dispatch.use("auto", index_kl="triton"):
        check(judge(*losses(shape, kind, count, None, torch.bfloat16), torch.bfloat16))


def test_a_graph_takes_the_loss(backend: str) -> None:
    leaves = [x.requires_grad_() for x in indexer(6, 6)]
    q = torch.randn(B, 2, 6, 4, device=DEVICE)

    def loss(*leaves: Tensor) -> Tensor:
        return index_kl(*leaves, q, q, scale=0.5)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), loss(*leaves))
    compiled(*leaves).backward()
    assert all(x.grad is not None for x in leaves)


def test_wrong_arguments_are_named() -> None:
    q, k, weight = indexer(5, 8)
    with pytest.raises(ValueError, match=r"keys must be \[2, 5 or more, 6\]"):
        index_topk(q, k[..., 1:], weight, 3)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        index_topk(q, k, weight, 0)
    attention = torch.randn(B, 2, 5, 4)
    with pytest.raises(ValueError, match=r"keys \[2, groups, 8, width\]"):
        index_kl(q, k, weight, attention, attention, scale=1.0)
    attention = torch.randn(B, 2, 8, 4)
    bits = torch.zeros(B, 2, 5, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="bits must be int32"):
        index_kl(q, k, weight, attention[:, :, :5], attention, scale=1.0, bits_BJTW=bits)


def test_heads_that_do_not_fit_are_named() -> None:
    assert limits.of_index_kl(torch.empty(1, 128), torch.empty(1, 256).half()) is None
    for tensor, reason in (
        (torch.empty(1, 129), "up to 128 wide, got 129"),
        (torch.empty(1, 257).half(), "up to 256 wide, got 257"),
        (torch.empty(1, 8).double(), "got fp64"),
    ):
        assert reason in str(limits.of_index_kl(torch.empty(1, 8), tensor))


@pytest.mark.gpu
def test_more_keys_than_a_program_holds_are_chosen_from_as_in_plain_pytorch() -> None:
    g = torch.Generator(DEVICE).manual_seed(0)

    def whole(*shape: int) -> Tensor:
        """Small integers: sums are exact, and many scores equal."""
        return torch.randint(-2, 3, shape, generator=g, device=DEVICE).bfloat16()

    q, k, weight = whole(1, 500, 2, 64), whole(1, 70_000, 64), whole(1, 500, 2)
    keep = torch.rand(1, 70_000, generator=g, device=DEVICE) < 0.8
    chosen = []
    for backend in ("reference", "triton"):
        with dispatch.use("auto", index_topk=backend):
            chosen.append(index_topk(q, k, weight, 2048, keep_BS=keep))
    assert torch.equal(*chosen)
