"""Gated delta rule in Triton: the chunkwise kernels with beta.

A single step is plain PyTorch, as in the reference; what layers decode with is `gdn_step`.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels.chunkwise.run import linear_attention
from ltconvert.kernels.delta_rule.reference import delta_rule_step as delta_rule_step


def delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    beta_BTH: Tensor,
    log_decay: Tensor | None,
    initial_state_BHKV: Tensor | None,
    counts_BT: Tensor | None,
    *,
    scale: float,
    l2norm_qk: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor]:
    """See `ltconvert.kernels.delta_rule.delta_rule`; padding holds zeros.

    There is one chunk size (`kernels.limits`).
    """
    return linear_attention(
        q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay, initial_state_BHKV, counts_BT,
        scale=scale, l2norm_qk=l2norm_qk,
    )  # fmt: skip
