"""Matrix products in which each row has a matrix of its own choice: rows sorted by expert.

Nothing here makes the host wait for a GPU. Rows go to their places and back by
``kernels.permute``.

There are as many rows as choices, those of nulls (numbers from E on) too, since what depends on a
choice can be no size. But a null's choice has no place: the rows behind the last expert's are not
multiplied, hold anything at all, and nothing reads them.

N tokens, K choices a token, M = N K rows, E experts, I input and O output channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Grouping(NamedTuple):
    """Rows in the order of their experts.

    Attributes:
        place_NK: for each choice its place among the sorted rows; -1 of a null.
        expert_M: of each sorted row; E of those that are nobody's.
        ends_E: where the rows of each expert end, int32.
    """

    place_NK: Tensor
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
    place_NK = place_M.view_as(chosen_NK).masked_fill(chosen_NK >= experts, -1)
    return Grouping(place_NK, expert_M.clamp(max=experts), ends_E)


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
    products = [x_MI[a:b] @ weight_OI.mT for a, b, weight_OI in spans]
    return torch.cat([*products, x_MI.new_zeros(len(x_MI) - ends[-1], weight_EOI.shape[1])])


def _has_kernel(weight_EOI: Tensor) -> bool:
    whole = all(size * weight_EOI.itemsize % 16 == 0 for size in weight_EOI.shape[1:])
    return weight_EOI.is_cuda and weight_EOI.dtype == torch.bfloat16 and whole
