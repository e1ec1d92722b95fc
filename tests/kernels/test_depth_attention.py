"""Mixture-of-depths attention: the reference against single queries, the kernel against both."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ltconvert.kernels import dispatch
from ltconvert.kernels.depth_attention import depth_attention, depth_only_attention

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if GPU else [torch.float32]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or (not GPU and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="no triton, or neither a GPU nor its interpreter",
)
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


def results(call: Call, x: Inputs, dtype: torch.dtype | None = None) -> dict[str, Tensor | None]:
    """What ``call`` returns, and the gradients of its output under random weights."""
    leaves = {
        n: y.detach().to(dtype or y.dtype).requires_grad_() for n, y in x.items() if y is not None
    }
    o, *sums = call(**leaves)
    g = torch.Generator().manual_seed(5)
    upstream = torch.randn(o.shape, generator=g).to(DEVICE, x["q"].dtype)  # rounded alike always
    o.backward(upstream.to(o.dtype))
    grads = {f"gradient of {n}": y.grad for n, y in leaves.items()}
    found = {"output": o, "log sum": sums[0], "share": sums[1]}
    return {n: y.detach() for n, y in found.items()} | grads


def by_backend(backend: str, **options: Any) -> Call:
    def call(
        q: Tensor, k: Tensor, v: Tensor, depth_k: Tensor, depth_v: Tensor,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        with dispatch.use(depth_attention=backend):
            return depth_attention(q, k, v, depth_k, depth_v, bias_H=bias, **options)

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
        if value is not None:
            got = found[name]  # none where there are no slots
            got = torch.zeros_like(value) if got is None else got
            torch.testing.assert_close(got, value, msg=name)


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
