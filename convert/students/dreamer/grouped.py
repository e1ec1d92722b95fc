"""Matrix products in which each row has a matrix of its own choice: rows sorted by expert.

Nothing here makes the host wait for a GPU, and no sum depends on the order of threads: rows are
copied to their places and back, in the backward pass too.

N tokens, K experts a token, M = N K rows, E experts, I input and O output channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Grouping(NamedTuple):
    """Rows in the order of their experts.

    Attributes:
        order_M: for each sorted row the unsorted one, token * K + choice.
        place_M: for each unsorted row its place among the sorted ones.
        expert_M: of each sorted row.
        ends_E: where the rows of each expert end, int32.
    """

    order_M: Tensor
    place_M: Tensor
    expert_M: Tensor
    ends_E: Tensor


def group(chosen_NK: Tensor, experts: int) -> Grouping:
    """Sort the choices [N, K] by expert."""
    expert_M, order_M = chosen_NK.flatten().sort(stable=True)
    place_M = torch.empty_like(order_M)
    place_M[order_M] = torch.arange(len(order_M), device=order_M.device)
    ends_E = torch.searchsorted(
        expert_M, torch.arange(experts, device=expert_M.device), right=True
    ).int()
    return Grouping(order_M, place_M, expert_M, ends_E)


def spread(x_NI: Tensor, grouping: Grouping) -> Tensor:
    """Each token's vector once for each of its experts, sorted: [M, I]."""
    out: Tensor = _Spread.apply(x_NI, grouping.order_M, grouping.place_M)
    return out


def gather(y_MO: Tensor, weights_NK: Tensor, grouping: Grouping) -> Tensor:
    """Each token's rows, weighed and added up: [N, O]."""
    y_NKO: Tensor = _Unsort.apply(y_MO, grouping.order_M, grouping.place_M)
    y_NKO = y_NKO.unflatten(0, weights_NK.shape)
    with torch.autocast(y_MO.device.type, enabled=False):  # gains come in fp32 and stay so
        return (weights_NK.to(y_MO.dtype)[:, None] @ y_NKO)[:, 0]


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, grouping: Grouping) -> Tensor:
    """``x W_e^T`` with each sorted row's own expert e, [M, O] in the weight's dtype.

    One grouped product where PyTorch has it (half precision on a GPU, rows of whole 16 bytes); else
    one product an expert.
    """
    x_MI = x_MI.to(weight_EOI.dtype)  # what an activation gives may be wider
    if _has_kernel(weight_EOI):
        y_MO: Tensor = torch._grouped_mm(x_MI, weight_EOI.mT, grouping.ends_E)
        return y_MO
    ends = grouping.ends_E.tolist()
    weights = weight_EOI.unbind()
    spans = zip([0, *ends], ends, weights, strict=False)
    return torch.cat([x_MI[a:b] @ weight_OI.mT for a, b, weight_OI in spans])


def _has_kernel(weight_EOI: Tensor) -> bool:
    whole = all(size * weight_EOI.itemsize % 16 == 0 for size in weight_EOI.shape[1:])
    return weight_EOI.is_cuda and weight_EOI.dtype == torch.bfloat16 and whole


class _Spread(torch.autograd.Function):
    """Copies of tokens to sorted rows; the gradient of a token is the sum of its rows'."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, order_M: Tensor, place_M: Tensor) -> Tensor:
        ctx.save_for_backward(place_M)
        ctx.choices = len(order_M) // len(x_NI)
        return x_NI[order_M // ctx.choices]

    @staticmethod
    def backward(ctx: Any, dy_MI: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (place_M,) = ctx.saved_tensors
        return dy_MI[place_M].unflatten(0, (-1, ctx.choices)).sum(1), None, None


class _Unsort(torch.autograd.Function):
    """Sorted rows back in the order of tokens."""

    @staticmethod
    def forward(ctx: Any, y_MO: Tensor, order_M: Tensor, place_M: Tensor) -> Tensor:
        ctx.save_for_backward(order_M)
        return y_MO[place_M]

    @staticmethod
    def backward(ctx: Any, dy_MO: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (order_M,) = ctx.saved_tensors
        return dy_MO[order_M], None, None
