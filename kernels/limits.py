"""What the Triton kernels do not take: each function gives the reason in words, or None."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_TOKENS = 64
MOST_WIDTH = 256
MOST_CHANNEL_WIDTH = 128
MOST_WINDOW_WIDTH_FP32 = 64  # what shared memory holds
MOST_SHARED = 32
MOST_TAPS = 8
MOST_DECODED_ROWS = 16
MOST_ROUTED = 1024  # logits, which one warp holds


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


def of_window_attention(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> str | None:
    """The same, width, one precision, and no past."""
    most = MOST_WINDOW_WIDTH_FP32 if q_BTHD.dtype == torch.float32 else MOST_WIDTH
    if q_BTHD.shape[-1] > most:
        return f"heads of {q_BTHD.dtype} are up to {most} wide, got {q_BTHD.shape[-1]}"
    if k_BSGD.shape[1] > q_BTHD.shape[1]:
        return "it has no keys before the first query"
    if len(made := {x.dtype for x in (q_BTHD, k_BSGD, v_BSGD)}) > 1:
        return f"q, k and v must have one dtype, got {', '.join(sorted(map(str, made)))}"
    return of_precision(q_BTHD)


def of_depth_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGD: Tensor,
    depth_k_BTNGD: Tensor,
    depth_v_BTNGD: Tensor,
    plain: bool,
) -> str | None:
    """Those of the depth part, and of what attends to the sequence.

    ``plain``: no documents, padding and soft cap.
    """
    limit = of_depth_only_attention(q_BTHD, depth_k_BTNGD, depth_v_BTNGD)
    one_dtype = q_BTHD.dtype == k_BSGD.dtype == v_BSGD.dtype
    if limit is not None or (plain and one_dtype and fused_attention_takes(q_BTHD)):
        return limit
    return of_window_attention(q_BTHD, k_BSGD, v_BSGD)


def fused_attention_takes(q_BTHD: Tensor) -> bool:
    """Whether PyTorch's fused attention runs on such heads, as far as the tensor says."""
    half = q_BTHD.dtype in (torch.float16, torch.bfloat16)
    width = q_BTHD.shape[3]
    nvidia = q_BTHD.device.type == "cuda" and torch.version.hip is None
    return nvidia and half and width % 8 == 0 and width <= MOST_WIDTH


def of_depth_only_attention(
    q_BTHD: Tensor, depth_k_BTNGD: Tensor, depth_v_BTNGD: Tensor
) -> str | None:
    """The same, width, query heads that share keys, and one precision."""
    heads, width = q_BTHD.shape[2:]
    if width > MOST_WIDTH:
        return f"heads are up to {MOST_WIDTH} wide, got {width}"
    if (shared := heads // depth_k_BTNGD.shape[3]) > MOST_SHARED:
        return f"up to {MOST_SHARED} query heads share keys, got {shared}"
    if len(made := {x.dtype for x in (q_BTHD, depth_k_BTNGD, depth_v_BTNGD)}) > 1:
        return (
            f"queries and depth keys must have one dtype, got {', '.join(sorted(map(str, made)))}"
        )
    return of_precision(q_BTHD)


def of_decode_attention(q_BHD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor) -> str | None:
    """The same, width and layout of the cache, which is never copied."""
    width = q_BHD.shape[-1]
    if width > MOST_WIDTH:
        return f"heads are up to {MOST_WIDTH} wide, got {width}"
    if k_BGSD.stride(-1) != 1 or v_BGSD.stride(-1) != 1:
        return "the channels of a key and of a value have to lie side by side"
    return of_precision(q_BHD, k_BGSD, v_BGSD)


def of_decode_linear(x_BC: Tensor, weight: Tensor) -> str | None:
    """The same, number of rows and layout of the weight, which is never copied."""
    if x_BC.shape[0] > MOST_DECODED_ROWS:
        return f"it has at most {MOST_DECODED_ROWS} rows, got {x_BC.shape[0]}"
    if weight.stride(-1) != 1:
        return "the weights of an output have to lie side by side"
    return of_precision(x_BC, weight)


def of_decode_experts(x: Tensor, weight_ERC: Tensor) -> str | None:
    """The same, but for the number of rows."""
    if weight_ERC.stride(-1) != 1:
        return "the weights of an output have to lie side by side"
    return of_precision(x, weight_ERC)


def of_decode_route(h_BC: Tensor, keys_XC: Tensor) -> str | None:
    """The same, and the number of logits."""
    if len(keys_XC) > MOST_ROUTED:
        return f"it chooses among at most {MOST_ROUTED}, got {len(keys_XC)}"
    return of_precision(h_BC, keys_XC)


def of_sparse_attention(q_BHTD: Tensor) -> str | None:
    """The same, and width: four tiles of heads have to fit into shared memory."""
    most = MOST_WIDTH // 2 if q_BHTD.dtype == torch.float32 else MOST_WIDTH
    if q_BHTD.shape[-1] > most:
        return f"heads of {q_BHTD.dtype} are up to {most} wide, got {q_BHTD.shape[-1]}"
    return of_precision(q_BHTD)


def of_index(q_BTIE: Tensor) -> str | None:
    """The same, and width."""
    if q_BTIE.shape[-1] > MOST_WIDTH:
        return f"index heads are up to {MOST_WIDTH} wide, got {q_BTIE.shape[-1]}"
    return of_precision(q_BTIE)


def of_index_kl(*heads: Tensor) -> str | None:
    """Those of attention over chosen keys, for queries and keys of the indexer, too."""
    return next(filter(None, map(of_sparse_attention, heads)), None)
