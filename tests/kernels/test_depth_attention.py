"""Mixture-of-depths attention: the reference against single queries, the kernel against both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from decode_case import DEVICE, GPU, needs_triton
from helpers import diagonal
from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.depth_attention import depth_attention, depth_only_attention
from ltconvert.kernels.parity import check, judge
from ltconvert.kernels.segments import segment_bounds

DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.float32]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
Inputs = Mapping[str, Tensor]
Call = Callable[..., tuple[Tensor, ...]]


def inputs_of(
    length: int, *, batch: int = 2, heads: int = 2, groups: int = 2, width: int = 16, past: int = 0,
    slots: int = 3, spare: int = 2, size: float = 1.0, dtype: torch.dtype = DTYPES[0],
) -> dict[str, Tensor]:  # fmt: skip
    """Random inputs; ``spare`` slots behind the valid ones hold NaN."""
    g = torch.Generator().manual_seed(length + heads + width + slots)

    def normal(*shape: int) -> Tensor:
        return (size * torch.randn(*shape, generator=g)).to(DEVICE, dtype)

    def buffer() -> Tensor:
        x = normal(slots + spare, batch, length, groups, width)
        x[slots:] = float("nan")
        return x.permute(1, 2, 0, 3, 4)

    keys = (batch, past + length, groups, width)
    return {
        "q": normal(batch, length, heads, width),
        "k": normal(*keys),
        "v": normal(*keys),
        "depth_k": buffer(),
        "depth_v": buffer(),
        "bias": torch.randn(heads, generator=g).to(DEVICE),
    }


def results(call: Call, x: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What ``call`` returns, and the gradients of its output under random weights."""
    leaves = {n: y.detach().to(dtype or y.dtype).requires_grad_() for n, y in x.items()}
    o, *sums = call(**leaves)
    g = torch.Generator().manual_seed(5)
    upstream = torch.randn(o.shape, generator=g).to(DEVICE, x["q"].dtype)  # rounded alike always
    o.backward(upstream.to(o.dtype))
    grads = {  # without slots nothing meets depth keys
        f"gradient of {n}": torch.zeros_like(y) if y.grad is None else y.grad
        for n, y in leaves.items()
    }
    found = {"output": o, "log sum": sums[0], "share": sums[1]}
    return {n: y.detach() for n, y in found.items()} | grads


def by_backend(backend: str, **options: Any) -> Call:
    given = {name: value for name, value in options.items() if name != "segment_ids_BT"}
    bounds = segment_bounds(options.get("segment_ids_BT"))

    def call(
        q: Tensor, k: Tensor, v: Tensor, depth_k: Tensor, depth_v: Tensor,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        with dispatch.use(depth_attention=backend):
            return depth_attention(q, k, v, depth_k, depth_v, bias_H=bias, bounds=bounds, **given)

    return call


def joint_softmax(
    q: Tensor, k: Tensor, v: Tensor, depth_k: Tensor, depth_v: Tensor, bias: Tensor | None = None,
    *, slots: int, scale: float, schedule: float = 1.0, window: int | None = None,
    soft_cap: float | None = None, segment_ids_BT: Tensor | None = None,
    keep_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The definition, one query and head at a time; ``schedule`` mixes odds of two softmaxes."""
    past, share = k.shape[1] - q.shape[1], q.shape[2] // k.shape[2]
    o, log_sum, of_depth = [], [], []
    for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        at, group = past + t, h // share
        seen = [
            s
            for s in range(max(0, at - (window or at + 1) + 1), at + 1)
            if s == at
            or (
                (keep_BS is None or keep_BS[b, s])
                and (segment_ids_BT is None or segment_ids_BT[b, s] == segment_ids_BT[b, t])
            )
        ]
        keys = torch.cat([k[b, seen, group], depth_k[b, t, :slots, group]])
        values = torch.cat([v[b, seen, group], depth_v[b, t, :slots, group]])
        s = scale * (keys @ q[b, t, h])
        s = s if soft_cap is None else soft_cap * torch.tanh(s / soft_cap)
        if bias is not None:
            s = torch.cat([s[: len(seen)], s[len(seen) :] + bias[h]])
        joint, alone = s.softmax(0), s[: len(seen)].softmax(0)
        mass = schedule * joint[len(seen) :].sum()
        weights = torch.cat([alone * (1 - mass), schedule * joint[len(seen) :]])
        o.append(weights @ values)
        log_sum.append(s[: len(seen)].logsumexp(0) - torch.log1p(-mass))
        of_depth.append(mass)
    sums = (torch.stack(x).view(q.shape[:3]) for x in (log_sum, of_depth))
    return torch.stack(o).view(q.shape), *sums


def documents(length: int, share: float) -> Tensor:
    g = torch.Generator().manual_seed(length)
    return (torch.rand(2, length, generator=g) < share).cumsum(1).to(DEVICE)


@pytest.mark.parametrize("schedule", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("slots", [0, 1, 5])
@pytest.mark.parametrize(
    ("past", "window", "cap", "kept"),
    [(0, None, None, "all"), (0, 4, 1.5, "documents"), (5, 7, None, "some"), (3, None, 2.0, "all")],
)
def test_the_reference_against_single_queries(
    past: int, window: int | None, cap: float | None, kept: str, slots: int, schedule: float
) -> None:
    length = 9
    x = inputs_of(length, heads=4, past=past, width=4, slots=slots, dtype=torch.float64)
    options: dict[str, Any] = {"scale": 0.7, "slots": slots, "window": window, "soft_cap": cap}
    if kept == "documents":
        options["segment_ids_BT"] = documents(length, 0.2)
    if kept == "some":
        keep = torch.rand(2, past + length, generator=torch.Generator().manual_seed(0)) < 0.7
        options["keep_BS"] = keep.to(DEVICE)
    x["bias"] = x["bias"].double()
    found = results(by_backend("reference", schedule=schedule, **options), x)
    wanted = results(lambda **given: joint_softmax(**given, schedule=schedule, **options), x)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_depth_alone_against_single_queries() -> None:
    x = inputs_of(4, heads=6, slots=5, dtype=torch.float64)
    o, log_sum = depth_only_attention(x["q"], x["depth_k"], x["depth_v"], slots=5, scale=0.4)
    for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in o.shape[:3])).tolist():
        s = 0.4 * x["depth_k"][b, t, :5, h // 3] @ x["q"][b, t, h]
        torch.testing.assert_close(o[b, t, h], s.softmax(0) @ x["depth_v"][b, t, :5, h // 3])
        torch.testing.assert_close(log_sum[b, t, h], s.logsumexp(0))


def test_a_schedule_on_the_device_is_a_number() -> None:
    x = inputs_of(6)
    want = results(by_backend("reference", slots=3, scale=0.2, schedule=0.25), x)
    given = torch.tensor(0.25, device=DEVICE)
    found = results(by_backend("reference", slots=3, scale=0.2, schedule=given), x)
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, msg=name)


def three_way(
    x: Inputs, real_BT: Tensor | None = None, *, but: Sequence[str] = (), **options: Any
) -> None:
    """The kernel against fp64 and plain PyTorch; what padding itself gets means nothing.

    Args:
        but: gradients that are not judged.
    """
    if real_BT is not None:
        options["keep_BS"] = real_BT

    def call(backend: str) -> Call:
        attend = by_backend(backend, **options)

        def masked(**given: Tensor) -> tuple[Tensor, ...]:
            found = attend(**given)
            if real_BT is None:
                return found
            return tuple(
                y.where(real_BT.view(*real_BT.shape, *[1] * (y.dim() - 2)), 0) for y in found
            )

        return masked

    truth = results(call("reference"), x, torch.float64)
    truth = {n: y for n, y in truth.items() if n not in but}
    check(judge(truth, results(call("reference"), x), results(call("triton"), x), x["q"].dtype))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("slots", "schedule"),
    diagonal([0, 1, 7, 64, 256] if GPU else [0, 7, 40], [0.0, 0.3, 1.0], each=1),
)
@pytest.mark.parametrize("length", [1, 63, 65, 1000] if GPU else [9])
def test_lengths_slots_and_schedules(
    length: int, slots: int, schedule: float, dtype: torch.dtype
) -> None:
    x = inputs_of(length, heads=6, slots=slots, dtype=dtype)
    # With one key these are g.v - g.o' of nearly equal numbers, o' rounded to the working dtype, as
    # in any attention's backward that reads its own output.
    rounded = length == 1 and dtype != torch.float32
    but = ("gradient of q", "gradient of k") if rounded else ()
    three_way(x, slots=slots, scale=0.25, schedule=schedule, but=but)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [1, 3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("width", [64, 80, 128, 256] if GPU else [24])
def test_widths_and_shared_keys(width: int, shared: int, dtype: torch.dtype) -> None:
    length = 300 if GPU else 5
    if dtype == torch.float32 and width > limits.MOST_WINDOW_WIDTH_FP32:
        length, width = 5, 64  # heads of fp32 that the sequence's kernel takes
    x = inputs_of(length, heads=2 * shared, width=width, slots=35, dtype=dtype)
    for schedule in (0.5, 1.0):
        three_way(x, slots=35, scale=width**-0.5, schedule=schedule)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", [0.6, pytest.param(1.0, marks=pytest.mark.slow)])
def test_windows_documents_padding_and_caps(schedule: float, dtype: torch.dtype) -> None:
    length = 330 if GPU else 17
    x = inputs_of(length, heads=2, groups=1, size=1.5, dtype=dtype)
    options: dict[str, Any] = {"slots": 3, "scale": 0.25, "schedule": schedule}
    real_BT = torch.ones(2, length, dtype=torch.bool, device=DEVICE)
    real_BT[0, :6] = real_BT[0, 9:11] = real_BT[1, -5:] = False
    three_way(x, window=10, **options)
    three_way(x, segment_ids_BT=documents(length, 0.1), soft_cap=3.0, **options)
    three_way(x, real_BT, window=12, segment_ids_BT=documents(length, 0.05), **options)


@needs_triton
@pytest.mark.skipif(not GPU, reason="PyTorch's fused attention takes the keys of the past")
@pytest.mark.parametrize("length", [1, 7, 130])
@pytest.mark.parametrize("window", [None, 50])
def test_keys_of_the_past(length: int, window: int | None) -> None:
    x = inputs_of(length, heads=4, past=90, width=64, slots=5, dtype=torch.bfloat16)
    three_way(x, slots=5, scale=0.125, schedule=0.7, window=window)


@needs_triton
@pytest.mark.parametrize("attention", ["cudnn", "flash"])
@pytest.mark.parametrize(("length", "window"), [(256, 256), (256, 64), (7, 256)])
def test_calls_fit_this_version_of_pytorch(attention: Any, length: int, window: int) -> None:
    """Arguments, shapes and layouts, without a device; values are tested on a GPU."""
    from ltconvert.kernels.depth_attention import sequence

    q = torch.empty(2, length, 8, 64, device="meta", dtype=torch.bfloat16)
    k, v = (torch.empty(2, 256, 2, 64, device="meta", dtype=torch.bfloat16) for _ in range(2))
    how: tuple[Any, ...] = None, None, None, window, 0.1, 0.0
    o, log_sum = sequence.forward(attention, q, k, v, *how)
    assert (o.shape, log_sum.shape) == (q.shape, (2, 8, length)) and o.is_contiguous()
    found = sequence.backward(attention, torch.empty_like(o), o, log_sum, q, k, v, *how)
    assert [x.shape for x in found] == [x.shape for x in (q, k, v)]


@needs_triton
@pytest.mark.parametrize(("bias", "schedule"), diagonal([-40.0, 0.0, 200.0], [0.3, 1.0]))
def test_one_part_far_ahead_of_the_other(schedule: float, bias: float) -> None:
    x = inputs_of(9, width=64, dtype=torch.float32)
    x["bias"] = torch.full_like(x["bias"], bias)
    found = results(by_backend("triton", slots=3, scale=0.125, schedule=schedule), x)
    wanted = results(by_backend("reference", slots=3, scale=0.125, schedule=schedule), x)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name, rtol=1e-4, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_depth_alone_and_its_log_sum(dtype: torch.dtype) -> None:
    x = inputs_of(300 if GPU else 9, heads=6, width=64, slots=40, dtype=dtype)
    x = {name: x[name] for name in ("q", "depth_k", "depth_v")}

    def call(backend: str) -> Call:
        def attend(q: Tensor, depth_k: Tensor, depth_v: Tensor) -> tuple[Tensor, ...]:
            with dispatch.use(depth_attention=backend):
                o, log_sum = depth_only_attention(q, depth_k, depth_v, slots=40, scale=0.125)
            return o + 0.1 * log_sum[..., None], o, log_sum

        return attend

    truth = results(call("reference"), x, torch.float64)
    check(judge(truth, results(call("reference"), x), results(call("triton"), x), dtype))


@needs_triton
def test_strides_and_repetition() -> None:
    x = inputs_of(5, batch=1, slots=5, dtype=torch.float32)
    by_token = {n: y.contiguous() if "depth" in n else y for n, y in x.items()}
    by_head = {
        n: y.transpose(1, 2).contiguous().transpose(1, 2) for n, y in x.items() if n != "bias"
    }
    by_channel = {n: y.mT.contiguous().mT if n != "bias" else y for n, y in x.items()}
    call = by_backend("triton", slots=5, scale=0.25, schedule=0.5)
    want = results(call, x)
    for other in (x, by_token, by_head | {"bias": x["bias"]}, by_channel):
        for name, value in results(call, other).items():
            assert torch.equal(value, want[name]), name


@needs_triton
@pytest.mark.skipif(not GPU, reason="half precision in the interpreter is not that of a GPU")
def test_repetition_with_deterministic_algorithms() -> None:
    x = inputs_of(500, heads=4, width=128, slots=9, dtype=torch.bfloat16)
    call = by_backend("triton", slots=9, scale=0.1)
    torch.use_deterministic_algorithms(True)
    try:
        want = results(call, x)
        assert all(torch.equal(y, want[n]) for n, y in results(call, x).items())
    finally:
        torch.use_deterministic_algorithms(False)


def test_under_autocast_scores_are_not_rounded() -> None:
    x = inputs_of(9, size=4.0, width=32, dtype=torch.bfloat16)
    options = {"slots": 3, "scale": 0.2}
    with torch.autocast(DEVICE, torch.bfloat16):
        found = by_backend("reference", **options)(**x)
    wanted = by_backend("reference", **options)(**{n: y.double() for n, y in x.items()})
    for ours, exact in zip(found[1:], wanted[1:], strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=1e-4)


def test_mistakes_are_named() -> None:
    x = inputs_of(5)
    good = {n: y for n, y in x.items() if n != "bias"}
    call = by_backend("reference", scale=1.0, slots=3)
    for name, value, message in [
        ("k", x["k"][:, 1:], r"keys and values must be \[2, 5 or more"),
        ("depth_k", x["depth_k"][:, 1:], r"depth keys and values must be \[2, 5, slots, 2, 16\]"),
        ("bias", x["bias"][1:], r"the bias must be \[2\], got \[1\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(**(good | {name: value}))
    for options, message in [
        ({"slots": 6}, "slots must be 0 to 5, which the buffers hold, got 6"),
        ({"slots": 1, "schedule": 1.5}, "from 0 to 1, got 1.5"),
        ({"slots": 1, "window": 0}, "at least 1 token, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            by_backend("reference", scale=1.0, **options)(**good)
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        depth_only_attention(x["q"], x["depth_k"], x["depth_v"], slots=0, scale=1.0)
