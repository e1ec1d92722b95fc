"""What the Triton kernels do not take: each function gives the reason in words, or None."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_TOKENS = 64
MOST_WIDTH = 256
MOST_CHANNEL_WIDTH = 128
MOST_TAPS = 8


def of_precision(*tensors: Tensor | None) -> str | None:
    """All kernels compute in fp32."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors):
        return "it computes in fp32, got fp64 inputs"
    return None


def of_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, chunk_size: int | None
) -> str | None:
    """The same, widths and chunks; q, k [..., K], v [..., V], decays [B, T, H] or [B, T, H, K]."""
    if chunk_size not in (None, CHUNK_TOKENS):
        return f"chunks have {CHUNK_TOKENS} tokens, got chunk_size {chunk_size}"
    key_width, value_width = q.shape[-1], v.shape[-1]
    if max(key_width, value_width) > MOST_WIDTH:
        return f"widths go up to {MOST_WIDTH}, got {key_width} (keys) and {value_width} (values)"
    per_channel = log_decay is not None and log_decay.dim() == q.dim()
    if per_channel and key_width > MOST_CHANNEL_WIDTH:
        return f"with decays per channel keys go up to {MOST_CHANNEL_WIDTH}, got {key_width}"
    return of_precision(q, k, v)


def of_convolution(x: Tensor, weight_DW: Tensor) -> str | None:
    """The same, and the number of taps."""
    if weight_DW.shape[1] > MOST_TAPS:
        return f"it has at most {MOST_TAPS} taps, got {weight_DW.shape[1]}"
    return of_precision(x, weight_DW)
