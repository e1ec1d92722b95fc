"""``window_attention``: both backends against single queries in fp64, gradients included.

Without a GPU the kernels run in Triton's interpreter, in fp32 on small shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from decode_case import DEVICE, GPU, needs_triton
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.parity import check, judge
from ltconvert.kernels.segments import Bounds, segment_bounds
from ltconvert.kernels.window_attention import tiles, window_attention
from ltconvert.kernels.window_attention.tiles import Tile

DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.float32]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
Inputs = Mapping[str, Tensor]


def inputs_of(
    length: int, *, batch: int = 2, heads: int = 2, groups: int = 2, width: int = 16,
    past: int = 0, size: float = 1.0, dtype: torch.dtype = DTYPES[0],
) -> dict[str, Tensor]:  # fmt: skip
    g = torch.Generator().manual_seed(length + heads + width)

    def normal(*shape: int) -> Tensor:
        return (size * torch.randn(*shape, generator=g)).to(DEVICE, dtype)

    keys = (batch, past + length, groups, width)
    return {"q": normal(batch, length, heads, width), "k": normal(*keys), "v": normal(*keys)}


def results(call, x: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor | None]:
    """Outputs, sums and gradients of ``call`` under random weights."""
    leaves = {n: y.detach().to(dtype or y.dtype).requires_grad_() for n, y in x.items()}
    o, log_sum = call(*leaves.values())
    g = torch.Generator().manual_seed(5)
    weights = [torch.randn(y.shape, generator=g).to(DEVICE) for y in (o, log_sum)]
    weights[0] = weights[0].to(x["q"].dtype)  # rounded alike in every run
    upstream = [w.to(y.dtype) for w, y in zip(weights, (o, log_sum), strict=True)]
    torch.autograd.backward((o, log_sum), upstream)
    grads = {f"gradient of {n}": y.grad for n, y in leaves.items()}
    return {"output": o.detach(), "log sum": log_sum.detach()} | grads


def by_backend(backend: str, **options: object):
    given = {name: value for name, value in options.items() if name != "segment_ids_BT"}
    bounds = segment_bounds(options.get("segment_ids_BT"))

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with dispatch.use(window_attention=backend):
            return window_attention(q, k, v, bounds=bounds, **given)

    return call


def by_queries(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, scale: float, soft_cap: float | None = None,
    segment_ids_BT: Tensor | None = None, keep_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, one query and head at a time."""
    past, share = k.shape[1] - q.shape[1], q.shape[2] // k.shape[2]
    outputs, sums = [], []
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            at = past + t
            seen = [
                s
                for s in range(max(0, at - window + 1), at + 1)
                if s == at
                or (
                    (keep_BS is None or keep_BS[b, s])
                    and (segment_ids_BT is None or segment_ids_BT[b, s] == segment_ids_BT[b, t])
                )
            ]
            for h in range(q.shape[2]):
                s = scale * (k[b, seen, h // share] @ q[b, t, h])
                s = s if soft_cap is None else soft_cap * torch.tanh(s / soft_cap)
                outputs.append(s.softmax(0) @ v[b, seen, h // share])
                sums.append(s.logsumexp(0))
    return torch.stack(outputs).view(q.shape), torch.stack(sums).view(q.shape[:3])


def three_way(x: Inputs, call=None, **options: object) -> None:
    """The kernel against fp64 and plain PyTorch."""
    truth = results(by_backend("reference", **options), x, torch.float64)
    plain = results(by_backend("reference", **options), x)
    kernel = results(call or by_backend("triton", **options), x)
    check(judge(truth, plain, kernel, x["q"].dtype))


def documents(length: int, share: float) -> Tensor:
    g = torch.Generator().manual_seed(length)
    return (torch.rand(2, length, generator=g) < share).cumsum(1).to(DEVICE)


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("window", [1, 3, 6, 40])
@pytest.mark.parametrize(("past", "kept"), [(0, "all"), (0, "documents"), (4, "all"), (9, "some")])
def test_the_reference_against_single_queries(
    past: int, kept: str, window: int, cap: float | None
) -> None:
    length = 23
    x = inputs_of(length, heads=4, past=past, width=4, dtype=torch.float64)
    options: dict[str, object] = {"window": window, "scale": 0.7, "soft_cap": cap}
    if kept == "documents":
        options["segment_ids_BT"] = documents(length, 0.2)
    if kept == "some":
        keep = torch.rand(2, past + length, generator=torch.Generator().manual_seed(0)) < 0.7
        options["keep_BS"] = keep.to(DEVICE)
    found = results(by_backend("reference", **options), x)
    wanted = results(lambda *given: by_queries(*given, **options), x)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 50, 64, 128, 500] if GPU else [1, 50, 128])
@pytest.mark.parametrize("length", [1, 63, 65, 1000, 4097] if GPU else [1, 150])
def test_windows_and_lengths(length: int, window: int, dtype: torch.dtype) -> None:
    x = inputs_of(length, dtype=dtype)
    three_way(x, window=window, scale=0.25)
    three_way(x, window=window, scale=0.25, segment_ids_BT=documents(length, 0.03))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 64, 80, 128, 256])
def test_widths_and_shared_keys(width: int, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and width > limits.MOST_WINDOW_WIDTH_FP32:
        pytest.skip("no kernel")
    x = inputs_of(130, heads=4, groups=2, width=width, dtype=dtype)
    three_way(x, window=70, scale=width**-0.5, segment_ids_BT=documents(130, 0.5))


def unsorted_documents(length: int, *starts: Sequence[int]) -> Tensor:
    """Ids of rows whose documents begin at 0 and at ``starts``; never the same again."""
    position, ids = torch.arange(length), torch.tensor([5, 2, 9, 0, 7, 3, 8, 1])
    rows = [torch.bucketize(position, torch.tensor(row), right=True) for row in starts]
    return ids[torch.stack(rows)].to(DEVICE)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tile",
    [Tile(64, 64, 4, 1, True), Tile(128, 64, 8, 1, True), Tile(64, 128, 8, 1, True)]
    + ([Tile(128, 128, 8, 1), Tile(128, 128, 8, 1, True)] if GPU else []),
    ids=str,
)
def test_documents_at_the_edges_of_tiles(
    tile: Tile, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows, windows within and beyond documents; blocks that are seen as a whole."""
    from ltconvert.kernels.window_attention import triton as launches

    monkeypatch.setattr(launches, "tile", lambda *_: tile)
    x = inputs_of(290, heads=2, groups=1, dtype=dtype)
    edges = unsorted_documents(290, [64, 128, 256], [1, 63, 65, 127, 129, 289])
    for window in (290, 200):
        three_way(x, window=window, scale=0.25, segment_ids_BT=edges)
    three_way(x, window=200, scale=0.25, soft_cap=1.5)


@needs_triton
def test_padding_is_seen_by_itself_alone() -> None:
    x = inputs_of(150, dtype=torch.float32)
    kept = torch.rand(2, 150, generator=torch.Generator().manual_seed(0)) < 0.7
    for window in (40, 150):
        options = {"window": window, "segment_ids_BT": documents(150, 0.03)}
        three_way(x, scale=0.25, keep_BS=kept.to(DEVICE), **options)


@pytest.mark.parametrize("shape", ["unsorted", "one"])
def test_the_bounds_of_documents(shape: str) -> None:
    unsorted = unsorted_documents(9, [1, 4], [8], [1, 2, 3, 4, 5, 6, 7])
    ids = unsorted if shape == "unsorted" else torch.full((2, 1), 3, device=DEVICE)
    bounds = segment_bounds(ids)
    if shape == "one" and not GPU:
        assert bounds is None
        return
    assert bounds is not None
    first, last = bounds
    for b, row in enumerate(ids.tolist()):
        same = [[s for s, other in enumerate(row) if other == own] for own in row]
        assert first[b].tolist() == [min(tokens) for tokens in same]
        assert last[b].tolist() == [max(tokens) for tokens in same]


@needs_triton
def test_long_reaches_take_tiles_of_their_own() -> None:
    for (kernel, channels), tile in tiles.OF_LONG.items():
        assert tiles.tile(kernel, channels, 2, tiles.LONG) == tile
        assert tiles.tile(kernel, channels, 2, tiles.LONG - 1)[:2] == (64, 64)
        assert tiles.tile(kernel, channels, 4, tiles.LONG)[:2] == (64, 64)


@needs_triton
def test_a_scale_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="must be above 0, got 0"):
        by_backend("triton", window=2, scale=0.0)(*inputs_of(5).values())


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_caps(dtype: torch.dtype) -> None:
    three_way(inputs_of(100, size=2.0, dtype=dtype), window=40, scale=0.3, soft_cap=2.0)


@needs_triton
@pytest.mark.parametrize("size", [0.0, 8.0])
def test_zeros_and_large_scores(size: float) -> None:
    """At 8 scores reach 380: exp overflows, and fp32 still holds them to 2e-5."""
    three_way(inputs_of(100, size=size, dtype=torch.float32), window=40, scale=0.3)


@needs_triton
def test_strides_and_repetition() -> None:
    x = inputs_of(100, heads=2)
    parts = torch.cat([y.flatten(2) for y in x.values()], -1)
    strided = dict(zip(x, (y.unflatten(-1, (2, -1)) for y in parts.chunk(3, -1)), strict=True))
    last = {n: y.transpose(1, 3).contiguous().transpose(1, 3) for n, y in x.items()}
    call = by_backend("triton", window=30, scale=0.25)
    want = results(call, x)
    for other in (x, strided, last):
        for name, value in results(call, other).items():
            assert torch.equal(value, want[name]), name


@needs_triton
def test_either_gradient_alone() -> None:
    x = inputs_of(70, dtype=torch.float32)
    for part in (0, 1):
        grads = []
        for backend in ("reference", "triton"):
            leaves = [y.clone().requires_grad_() for y in x.values()]
            y = by_backend(backend, window=20, scale=0.3)(*leaves)[part]
            found = torch.autograd.grad(y.square().sum(), leaves, allow_unused=True)
            pairs = zip(found, leaves, strict=True)
            grads.append([torch.zeros_like(v) if g is None else g for g, v in pairs])
        for ours, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-4)


@needs_triton
@pytest.mark.skipif(not GPU, reason="compiling needs a GPU")
def test_compiled_and_checkpointed() -> None:
    x = inputs_of(130)
    call = by_backend("triton", window=70, scale=0.25)
    want = results(call, x)
    compiled = torch.compile(call, fullgraph=True)
    for other in (compiled, lambda *y: checkpoint(call, *y, use_reentrant=False)):
        for name, value in results(other, x).items():
            torch.testing.assert_close(value, want[name], msg=name)


@pytest.mark.parametrize("length", [9, 64])
@pytest.mark.parametrize("size", [1.0, 8.0])
def test_under_autocast_scores_are_not_rounded(length: int, size: float) -> None:
    """The inputs are; from there on the log of the sum is good to fp32."""
    x = inputs_of(length, size=size, width=32, dtype=torch.bfloat16)
    options = {"window": 6, "scale": 0.2}
    with torch.autocast(DEVICE, torch.bfloat16):
        _, found = window_attention(*x.values(), **options)
    _, wanted = by_backend("reference", **options)(*(y.double() for y in x.values()))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)


def test_mistakes_are_named() -> None:
    x = inputs_of(5)
    with pytest.raises(ValueError, match=r"keys and values must be \[2, 5 or more"):
        window_attention(x["q"], x["k"][:, 1:], x["v"][:, 1:], window=2, scale=1.0)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        window_attention(*x.values(), window=0, scale=1.0)
    bounds = Bounds(*torch.zeros(2, 2, 4, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="as many keys as queries"):
        window_attention(x["q"][:, 1:], x["k"], x["v"], window=2, scale=1.0, bounds=bounds)
    with pytest.raises(ValueError, match=r"bounds of segments must be .* \[2, 5\], got \[2, 4\]"):
        window_attention(*x.values(), window=2, scale=1.0, bounds=bounds)
