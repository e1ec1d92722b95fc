"""The sequence's part of ``depth_attention``: which attention computes it, and its backward.

Every one gives the log of its weights' sum, and takes in its backward another output and another
log sum than it gave: that is all a merge with something else needs (docs/kernels.md).

B batch, T queries, S keys, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

import ltconvert.kernels.window_attention.triton  # noqa: F401  (registers the ops called here)
from ltconvert.kernels import limits

Attention = Literal["cudnn", "flash", "tiles"]

CUDNN_WIDTH = 128
CUDNN_TOKENS = 128  # its gain is on long rows
CUDNN_ON = (9, 10)  # Hopper and Blackwell: its kernels there are ahead of FlashAttention 2


def pick(
    q_BTHD: Tensor, k_BSGD: Tensor, first: Tensor | None, keep: Tensor | None,
    window: int, cap: float, training: bool,
) -> Attention:  # fmt: skip
    """The fastest that takes the call.

    cuDNN makes a plan for every new shape, which takes longer than the attention: it is for
    training, where shapes repeat. FlashAttention 2 also takes windows and keys of the past. What
    has documents, padding, a soft cap or fp32 goes to this package's own ``window_attention``.
    """
    (length, _, width), keys = q_BTHD.shape[1:], k_BSGD.shape[1]
    if not limits.fused_attention_takes(q_BTHD) or first is not None or keep is not None or cap:
        return "tiles"
    fits = width <= CUDNN_WIDTH and length == keys and window >= keys and length >= CUDNN_TOKENS
    if training and fits and _cudnn_runs(q_BTHD.device):
        return "cudnn"
    return "flash"


def forward(
    attention: Attention,
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    keep_BT: Tensor | None,
    window: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Outputs, contiguous and the caller's to overwrite, and log sums [B, H, T] in fp32."""
    if attention == "cudnn":
        global _cudnn_sum_axes
        heads = (x.transpose(1, 2) for x in (q_BTHD, k_BSGD, v_BSGD))
        o_BHTD, log_sum, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads, None, True, 0.0, True, scale=scale
        )
        _cudnn_sum_axes = log_sum.dim()
        return o_BHTD.transpose(1, 2).contiguous(), log_sum.reshape(o_BHTD.shape[:3])
    if attention == "flash":
        o_BTHD, log_sum_BHT, *_ = torch.ops.aten._flash_attention_forward(
            q_BTHD, k_BSGD, v_BSGD, None, None, q_BTHD.shape[1], k_BSGD.shape[1], 0.0, True, False,
            scale=scale, **_reach(window, k_BSGD),
        )  # fmt: skip
        return o_BTHD.contiguous(), log_sum_BHT.contiguous()
    return torch.ops.ltconvert.window_attention(
        q_BTHD, k_BSGD, v_BSGD, first_BT, last_BT, keep_BT, window, scale, cap
    )


def backward(
    attention: Attention,
    do_BTHD: Tensor,
    o_BTHD: Tensor,
    log_sum_BHT: Tensor,
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    first_BT: Tensor | None,
    last_BT: Tensor | None,
    keep_BT: Tensor | None,
    window: int,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, taking ``o`` and ``log_sum`` for the forward's."""
    if attention == "tiles":
        return torch.ops.ltconvert.window_attention_backward(
            do_BTHD, None, o_BTHD, log_sum_BHT, q_BTHD, k_BSGD, v_BSGD, first_BT, last_BT,
            keep_BT, window, scale, cap,
        )  # fmt: skip
    lengths = q_BTHD.shape[1], k_BSGD.shape[1]
    # Seeds, which are read with dropout alone; their types are those of the forwards.
    dtype = torch.uint64 if attention == "flash" else torch.int64
    seed, offset = (torch.empty(size, dtype=dtype, device=q_BTHD.device) for size in ((2,), ()))
    if attention == "flash":
        return torch.ops.aten._flash_attention_backward(
            do_BTHD, q_BTHD, k_BSGD, v_BSGD, o_BTHD, log_sum_BHT, None, None, *lengths, 0.0, True,
            seed, offset, scale=scale, **_reach(window, k_BSGD),
        )  # fmt: skip
    log_sum = log_sum_BHT if _cudnn_sum_axes == 3 else log_sum_BHT[..., None]
    do, q, k, v, o = (x.transpose(1, 2) for x in (do_BTHD, q_BTHD, k_BSGD, v_BSGD, o_BTHD))
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, o, log_sum, offset, offset, None, None, None, *lengths, 0.0, True,
        scale=scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


# Whether cuDNN's log sums have a last axis of 1 differs by PyTorch's version; it wants its own.
_cudnn_sum_axes = 4


def _reach(window: int, k_BSGD: Tensor) -> dict[str, int]:
    """FlashAttention's form of a window; none where it reaches everything."""
    if window >= k_BSGD.shape[1]:
        return {}
    return {"window_size_left": window - 1, "window_size_right": 0}


def _cudnn_runs(device: torch.device) -> bool:
    allowed = torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
    either = not torch.are_deterministic_algorithms_enabled()  # its backward's sums vary in order
    return allowed and either and torch.cuda.get_device_capability(device)[0] in CUDNN_ON
