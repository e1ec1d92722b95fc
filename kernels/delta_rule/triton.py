"""Gated delta rule in Triton: the chunkwise kernels with beta, and a one-token kernel."""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels.chunkwise.run import linear_attention
from ltconvert.kernels.delta_rule.reference import delta_rule_step as delta_rule_step
from ltconvert.kernels.segments import padding_mask, segment_counts


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay: Tensor | None,
    *,
    initial_state_BHKV: Tensor | None,
    segment_ids_BT: Tensor | None,
    keep_BT: Tensor | None,
    scale: float,
    l2norm_qk: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """See `ltconvert.kernels.delta_rule.delta_rule`."""
    keep_BT = padding_mask(keep_BT)
    counts_BT = segment_counts(segment_ids_BT, keep_BT)
    if keep_BT is not None:
        keep_BT1, keep_BT11 = keep_BT[..., None], keep_BT[..., None, None]
        q_BTHK, k_BTHK, v_BTHV = (x.where(keep_BT11, 0) for x in (q_BTHK, k_BTHK, v_BTHV))
        beta_BTH = beta_BTH.where(keep_BT1, 0)
        if log_decay is not None:
            log_decay = log_decay.where(keep_BT1 if log_decay.dim() == 3 else keep_BT11, 0)
    return linear_attention(
        q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay, initial_state_BHKV, counts_BT,
        scale=scale, l2norm_qk=l2norm_qk, chunk_size=chunk_size,
    )  # fmt: skip
