"""Decay attention in Triton: the chunkwise kernels without corrections, and a one-token step."""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels.chunkwise.run import linear_attention
from ltconvert.kernels.decay_attention.reference import (
    decay_attention_step as decay_attention_step,
)
from ltconvert.kernels.segments import padding_mask, segment_counts


def decay_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    *,
    initial_state_BHKV: Tensor | None,
    segment_ids_BT: Tensor | None,
    keep_BT: Tensor | None,
    scale: float,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """See `ltconvert.kernels.decay_attention.decay_attention`."""
    keep_BT = padding_mask(keep_BT)
    counts_BT = segment_counts(segment_ids_BT, keep_BT)
    if keep_BT is not None:
        keep_BT1, keep_BT11 = keep_BT[..., None], keep_BT[..., None, None]
        q_BTHK, k_BTHK, v_BTHV = (x.where(keep_BT11, 0) for x in (q_BTHK, k_BTHK, v_BTHV))
        log_decay_BTH = log_decay_BTH.where(keep_BT1, 0)
    return linear_attention(
        q_BTHK, k_BTHK, v_BTHV, None, log_decay_BTH, initial_state_BHKV, counts_BT,
        scale=scale, l2norm_qk=False, chunk_size=chunk_size,
    )  # fmt: skip
