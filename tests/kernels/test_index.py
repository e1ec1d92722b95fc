"""The indexer's choice and its loss, against one query at a time and autograd in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decode_case import DEVICE, GPU, needs_triton
from helpers import covering
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.index_kl import index_kl
from ltconvert.kernels.index_topk import decode_topk, index_topk
from ltconvert.kernels.sparse_attention import seen
from ltconvert.kernels.sparse_attention.bits import unpack

B, HEADS, WIDTH = 2, 3, 6
BACKENDS = ["reference", pytest.param("triton", marks=needs_triton)]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend asked for, chunks so small that there are several."""
    only = {"index_topk": request.param}
    monkeypatch.setattr(dispatch, "_requests", dispatch.Requests("auto", only))
    monkeypatch.setattr(seen, "MOST_SCORES", 500)
    if request.param == "triton" and not GPU:
        from ltconvert.kernels.index_topk import triton

        monkeypatch.setattr(triton, "TILE", (16, 16))
        monkeypatch.setattr(triton, "LEAST_WIDTH", 16)
    yield request.param


def indexer(length: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and weights; every fourth query has no positive product, so that all tie."""
    g = torch.Generator().manual_seed(length)
    q = torch.randn(B, length, HEADS, WIDTH, generator=g)
    k, weight = torch.randn(B, keys, WIDTH, generator=g), torch.randn(B, length, HEADS, generator=g)
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


@pytest.mark.parametrize("kind", ["all", "window", "padded"])
def test_more_keys_than_fit_into_registers(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "triton":
        from ltconvert.kernels.index_topk import triton

        monkeypatch.setattr(triton, "MOST_KEYS", 16)
    test_the_best_keys_are_chosen(backend, (17, 40), kind, 4)


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


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("kind", ["all", "window", "padded"])
def test_the_loss_and_its_gradients(
    kind: str, chosen: bool, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen, "MOST_SCORES", 500)
    length, keys, heads, groups, width = 9, 12, 4, 2, 5
    given, seen_BTS = reach(kind, length, keys)
    leaves = [x.requires_grad_() for x in indexer(length, keys, torch.float64)]
    g = torch.Generator().manual_seed(1)
    q = torch.randn(B, heads, length, width, generator=g, dtype=torch.float64).to(DEVICE)
    k = torch.randn(B, groups, keys, width, generator=g, dtype=torch.float64).to(DEVICE)
    bits = index_topk(*(x.detach() for x in leaves), 3, **given) if chosen else None
    found = index_kl(*leaves, q, k, scale=0.7, soft_cap=cap, bits_BJTW=bits, **given)
    if chosen:
        seen_BTS = unpack(bits[:, 0], keys)
    scores = 0.7 * q @ k.repeat_interleave(heads // groups, 1).mT
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    p = scores.masked_fill(~seen_BTS[:, None], float("-inf")).softmax(-1).mean(1)
    index = torch.einsum("bti,btis->bts", leaves[2], (leaves[0] @ leaves[1][:, None].mT).relu())
    log_q = index.masked_fill(~seen_BTS, float("-inf")).log_softmax(-1)
    kl_BT = (torch.special.xlogy(p, p) - p * log_q.masked_fill(~seen_BTS, 0.0)).sum(-1)
    real = given["keep_BS"][:, keys - length :] if kind == "padded" else torch.ones_like(kl_BT) > 0
    wanted = kl_BT[real].mean()
    torch.testing.assert_close(found, wanted)
    for a, b in zip(
        torch.autograd.grad(2.0 * found, leaves), torch.autograd.grad(2.0 * wanted, leaves),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_a_graph_takes_the_loss() -> None:
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
