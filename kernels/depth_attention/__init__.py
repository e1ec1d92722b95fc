"""Mixture-of-depths attention: keys of the sequence and of the token's own depth in one softmax.

A sublayer leaves a key and a value of every token in a slot; later layers attend to their own
token's slots together with the sequence (MoDA, arXiv 2603.15619, section 3), or to them alone
(Dreamer's depth attention, arXiv 2601.21582).

B batch, T queries, S keys, N slots of a buffer, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.depth_attention.checks import check_depth, check_merge
from ltconvert.kernels.depth_attention.slots import (
    DepthSlots,
    SlotGradients,
    new_slots,
    write_slot,
)
from ltconvert.kernels.segments import Bounds
from ltconvert.kernels.window_attention import check_sequence

__all__ = [
    "DepthSlots",
    "SlotGradients",
    "depth_attention",
    "depth_only_attention",
    "new_slots",
    "write_slot",
]


def depth_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    *,
    slots: int,
    scale: float,
    schedule: float | Tensor = 1.0,
    bias_H: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    bounds: Bounds | None = None,
    keep_BS: Tensor | None = None,
    gradients: SlotGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention merged with attention to the token's own first ``slots`` depth keys.

    ``share = schedule * sigmoid(log_sum_depth + bias - log_sum_sequence)``,
    ``o = o_sequence + share * (o_depth - o_sequence)``. A schedule of 1 without bias is one softmax
    over both (MoDA as published), 0 is attention to the sequence alone.

    Args:
        k_BSGD, v_BSGD: of the queries' tokens and of S - T tokens before them, H a multiple of G;
            query head h reads key/value head ``h // (H / G)``.
        depth_k_BTNGD, depth_v_BTNGD: what earlier sublayers left; slots from ``slots`` on are not
            read, whatever stands there. Any strides; fastest with the slots outermost in memory.
        schedule: 0 to 1, or a tensor of one such element, which stays on its device.
        bias_H: added to the log of the depth keys' sum.
        window: tokens that a query sees of the sequence, itself included; None for all.
        soft_cap: scores of both parts pass through ``soft_cap * tanh(s / soft_cap)``.
        bounds: of ``segment_bounds``: a query sees its own document. Not with S > T.
        keep_BS: False at padding, which only padding itself sees.
        gradients: of ``DepthSlots``, whose keys and values these are: they get no gradient here,
            ``write_slot`` hands it to what was written.

    Returns:
        Outputs [B, T, H, D] in q's dtype, differentiable in q, k, v, depth_k, depth_v and bias. In
        fp32 (fp64 for fp64 inputs) and without gradient, both [B, T, H]: log_sum, by which a
        sequence key's share of the output is ``exp(s - log_sum)``, and the depth keys' share.

    Raises:
        ValueError: shapes that do not fit together, or a window below 1.
    """
    check_sequence(q_BTHD, k_BSGD, v_BSGD, window, bounds, keep_BS)
    check_depth(q_BTHD, depth_k_BTNGD, depth_v_BTNGD, slots, k_BSGD.shape[2])
    check_merge(q_BTHD, schedule, bias_H)
    plain = soft_cap is None and bounds is None and keep_BS is None
    limit = limits.of_depth_attention(q_BTHD, k_BSGD, v_BSGD, depth_k_BTNGD, depth_v_BTNGD, plain)
    return dispatch.implementation("depth_attention", q_BTHD.device, limit).depth_attention(
        q_BTHD, k_BSGD, v_BSGD, depth_k_BTNGD, depth_v_BTNGD, slots=slots, scale=scale,
        schedule=schedule, bias_H=bias_H, window=window, soft_cap=soft_cap,
        bounds=bounds, keep_BS=keep_BS, gradients=gradients,
    )  # fmt: skip


def depth_only_attention(
    q_BTHD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    *,
    slots: int,
    scale: float,
    soft_cap: float | None = None,
    gradients: SlotGradients | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each token to its own first ``slots`` depth keys.

    Arguments as in :func:`depth_attention`; ``slots`` is at least 1.

    Returns:
        Outputs [B, T, H, D] in q's dtype and the log of the weights' sum [B, T, H] in fp32 (fp64
        for fp64 inputs), both differentiable.

    Raises:
        ValueError: shapes that do not fit together, or no slot.
    """
    check_depth(q_BTHD, depth_k_BTNGD, depth_v_BTNGD, slots, depth_k_BTNGD.shape[-2])
    if slots < 1:
        raise ValueError("attention to depth keys alone needs at least 1 slot, got 0")
    limit = limits.of_depth_only_attention(q_BTHD, depth_k_BTNGD, depth_v_BTNGD)
    return dispatch.implementation("depth_attention", q_BTHD.device, limit).depth_only_attention(
        q_BTHD, depth_k_BTNGD, depth_v_BTNGD, slots=slots, scale=scale, soft_cap=soft_cap,
        gradients=gradients,
    )  # fmt: skip
