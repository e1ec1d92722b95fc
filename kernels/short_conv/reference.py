"""``short_conv`` in plain PyTorch: a sum over shifted copies, a block of tokens at a time.

The blocks keep intermediate values in the processor's cache; autograd over whole tensors takes
three times as long and keeps an fp32 copy of the input. n tokens of a block, S = H + T.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ltconvert.kernels.segments import can_look, padding_mask, segment_counts
from ltconvert.kernels.untraced import untraced

BLOCK_ELEMENTS = 1 << 18  # of one block, for each CPU thread; 1 MiB in fp32


def short_conv(
    x_BTD: Tensor,
    weight_DW: Tensor,
    *,
    history_BDH: Tensor | None,
    segment_ids_BT: Tensor | None,
    keep_BT: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """See ``ltconvert.kernels.short_conv.short_conv``."""
    length, past = x_BTD.shape[1], weight_DW.shape[1] - 1
    keep_BT = padding_mask(keep_BT)
    if keep_BT is not None:
        x_BTD = x_BTD.masked_fill(~keep_BT[..., None], 0)
    if history_BDH is None:
        source_BSD = F.pad(x_BTD, (0, 0, past, 0))
    else:
        source_BSD = torch.cat([history_BDH.transpose(1, 2).to(x_BTD.dtype), x_BTD], dim=1)
    counts_BT = segment_counts(segment_ids_BT, keep_BT)
    counts_BS = None if counts_BT is None else F.pad(counts_BT, (past, 0))
    y_BTD = _convolved(source_BSD, weight_DW, counts_BS, activation)
    last_BHD = source_BSD[:, length:]
    if counts_BS is not None:
        last_BHD = last_BHD * (counts_BS[:, length:] == counts_BS[:, -1:])[..., None]
    return y_BTD, last_BHD.transpose(1, 2)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        source_BSD: Tensor,
        weight_DW: Tensor,
        counts_BS: Tensor | None,
        activation: str | None,
    ) -> Tensor:
        ctx.save_for_backward(source_BSD, weight_DW, counts_BS)
        ctx.activation, past = activation, weight_DW.shape[1] - 1
        y_BTD = torch.empty_like(source_BSD[:, past:], memory_format=torch.contiguous_format)
        for block, wide_BSD, taps_WD, masks in _blocks(source_BSD, weight_DW, counts_BS):
            y_BnD = _convolve(wide_BSD, taps_WD, masks)
            y_BTD[:, block] = F.silu(y_BnD, inplace=True) if activation == "silu" else y_BnD
        return y_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BTD: Tensor) -> tuple[Tensor | None, ...]:
        source_BSD, weight_DW, counts_BS = ctx.saved_tensors
        work = torch.promote_types(source_BSD.dtype, torch.float32)
        dsource_BSD = torch.zeros_like(source_BSD, dtype=work)
        dtaps_WD = weight_DW.new_zeros(weight_DW.shape[::-1], dtype=work)
        for block, wide_BSD, taps_WD, masks in _blocks(source_BSD, weight_DW, counts_BS):
            dy_BnD = dy_BTD[:, block].to(work)
            if ctx.activation == "silu":
                y_BnD = _convolve(wide_BSD, taps_WD, masks)
                gate_BnD = torch.sigmoid(y_BnD)
                dy_BnD = dy_BnD * gate_BnD * (1 + y_BnD * (1 - gate_BnD))
            for tap, (taps_D, mask_Bn1) in enumerate(zip(taps_WD, masks, strict=True)):
                d_BnD = dy_BnD if mask_Bn1 is None else dy_BnD * mask_Bn1
                dsource_BSD[:, block.start + tap : block.stop + tap].addcmul_(d_BnD, taps_D)
                dtaps_WD[tap] += (d_BnD * wide_BSD[:, tap : tap + dy_BnD.shape[1]]).sum((0, 1))
        dweight_DW = dtaps_WD.t().to(weight_DW.dtype)
        return dsource_BSD.to(source_BSD.dtype), dweight_DW, None, None


@untraced
def _convolved(
    source_BSD: Tensor, weight_DW: Tensor, counts_BS: Tensor | None, activation: str | None
) -> Tensor:
    return _ShortConv.apply(source_BSD, weight_DW, counts_BS, activation)


def _convolve(wide_BSD: Tensor, taps_WD: Tensor, masks: list[Tensor | None]) -> Tensor:
    """Sum over taps of one block, [B, n, D]; ``wide_BSD`` begins H tokens before it."""
    past = len(taps_WD) - 1
    y_BnD = wide_BSD[:, past:] * taps_WD[past]
    for tap in range(past):
        x_BnD, mask_Bn1 = wide_BSD[:, tap : tap + y_BnD.shape[1]], masks[tap]
        y_BnD.addcmul_(x_BnD if mask_Bn1 is None else x_BnD * mask_Bn1, taps_WD[tap])
    return y_BnD


def _blocks(
    source_BSD: Tensor, weight_DW: Tensor, counts_BS: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor, list[Tensor | None]]]:
    """Blocks of tokens: (where, their inputs and H before, taps, what each tap may see).

    A mask is None where the tap sees all, as away from segment starts it does.
    """
    batch, _, channels = source_BSD.shape
    past = weight_DW.shape[1] - 1
    length = source_BSD.shape[1] - past
    step = length
    small = can_look(source_BSD)
    if small:
        room = BLOCK_ELEMENTS * torch.get_num_threads()
        step = min(length, max(1, room // max(1, batch * channels)))
    work = torch.promote_types(source_BSD.dtype, torch.float32)
    taps_WD = weight_DW.t().to(work).contiguous()
    for start in range(0, length, step):
        stop = min(start + step, length)
        masks: list[Tensor | None] = [None] * (past + 1)
        if counts_BS is not None:
            own_Bn = counts_BS[:, start + past : stop + past]
            for tap in range(past):
                same_Bn = counts_BS[:, start + tap : stop + tap] == own_Bn
                masks[tap] = None if small and same_Bn.all() else same_Bn[..., None]
        yield slice(start, stop), source_BSD[:, start : stop + past].to(work), taps_WD, masks
