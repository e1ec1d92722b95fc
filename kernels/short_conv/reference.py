"""``short_conv`` in plain PyTorch: a sum over shifted copies."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.segments import padding_mask, segment_counts


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
    with torch.autocast(x_BTD.device.type, enabled=False):
        work = torch.promote_types(x_BTD.dtype, torch.float32)
        if history_BDH is None:
            whole_BSD = F.pad(x_BTD, (0, 0, past, 0))
        else:
            whole_BSD = torch.cat([history_BDH.transpose(1, 2).to(x_BTD.dtype), x_BTD], dim=1)
        counts_BT = segment_counts(segment_ids_BT, keep_BT)
        counts_BS = None if counts_BT is None else F.pad(counts_BT, (past, 0))
        weight_DW, source_BSD = weight_DW.to(work), whole_BSD.to(work)
        y_BTD = source_BSD[:, past:] * weight_DW[:, past]
        for lag in range(1, past + 1):
            term_BTD = source_BSD[:, past - lag : past - lag + length] * weight_DW[:, past - lag]
            if counts_BS is not None:
                same_BT = counts_BS[:, past - lag : past - lag + length] == counts_BT
                term_BTD = term_BTD * same_BT[..., None]
            y_BTD = y_BTD + term_BTD
        if activation == "silu":
            y_BTD = F.silu(y_BTD)
    last_BHD = whole_BSD[:, length:]
    if counts_BS is not None:
        last_BHD = last_BHD * (counts_BS[:, length:] == counts_BS[:, -1:])[..., None]
    return y_BTD.to(x_BTD.dtype), last_BHD.transpose(1, 2)
