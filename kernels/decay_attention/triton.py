"""Decay attention in Triton: the chunkwise kernels without corrections. A step is plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels.chunkwise.run import linear_attention
from ltconvert.kernels.decay_attention.reference import (
    decay_attention_step as decay_attention_step,
)


def decay_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    initial_state_BHKV: Tensor | None,
    counts_BT: Tensor | None,
    *,
    scale: float,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """See `ltconvert.kernels.decay_attention.decay_attention`; padding holds zeros.

    There is one chunk size (`kernels.limits`).
    """
    return linear_attention(
        q_BTHK, k_BTHK, v_BTHV, None, log_decay_BTH, initial_state_BHKV, counts_BT,
        scale=scale, l2norm_qk=False,
    )  # fmt: skip
