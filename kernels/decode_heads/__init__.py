"""One decoded token between the projections and attention: q/k norms, positions, the cache.

B batch, H query heads, G key/value heads, D head width, M = (H + 2 G) * D channels of q, k and v
side by side, S slots of the cache.
"""

from __future__ import annotations

from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.decoding import refuse_gradients


def decode_heads(
    qkv_BM: Tensor,
    keys_BGSD: Tensor,
    values_BGSD: Tensor,
    slots_B: Tensor,
    *,
    num_heads: int,
    cos_BD: Tensor | None = None,
    sin_BD: Tensor | None = None,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_offset: float = 0.0,
    out_BHD: Tensor | None = None,
) -> Tensor:
    """Queries [B, H, D]; keys and values of row b are written into its slot ``slots_B[b]``.

    ``q_norm_weight`` [D] or [H * D] and ``k_norm_weight`` [D] or [G * D] are RMSNorms of each head
    or of the whole projection, ``norm_offset`` added to the weights. ``cos_BD`` and ``sin_BD``
    rotate q and k, the first half of D with the second. Without either, q and k are as they are.
    ``out_BHD`` is where the queries go, if given. Any strides but of the last axis. No gradient.

    Raises:
        ValueError: shapes that do not fit together, or a gradient that would be needed.
    """
    check_row(
        qkv_BM, keys_BGSD, values_BGSD, slots_B, num_heads, cos_BD, sin_BD, q_norm_weight,
        k_norm_weight,
    )  # fmt: skip
    if out_BHD is None:
        out_BHD = qkv_BM.new_empty(len(qkv_BM), num_heads, keys_BGSD.shape[-1])
    refuse_gradients("decode_heads", qkv_BM, q_norm_weight, k_norm_weight)
    limit = limits.of_precision(qkv_BM, keys_BGSD)
    dispatch.implementation("decode_heads", qkv_BM.device, limit).decode_heads(
        qkv_BM,
        keys_BGSD,
        values_BGSD,
        slots_B,
        out_BHD,
        cos_BD,
        sin_BD,
        q_norm_weight,
        k_norm_weight,
        norm_eps,
        norm_offset,
    )
    return out_BHD


def check_row(
    qkv_BM: Tensor,
    keys_BGSD: Tensor,
    values_BGSD: Tensor,
    slots_B: Tensor,
    num_heads: int,
    cos_BD: Tensor | None,
    sin_BD: Tensor | None,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
) -> None:
    """Raise ValueError where these do not fit together; see ``decode_heads``."""
    rows, kv_heads, _, width = keys_BGSD.shape
    channels = (num_heads + 2 * kv_heads) * width
    if (
        qkv_BM.shape != (rows, channels)
        or values_BGSD.shape != keys_BGSD.shape
        or slots_B.shape != (rows,)
    ):
        raise ValueError(
            f"with keys {list(keys_BGSD.shape)} and {num_heads} query heads, qkv must be "
            f"[{rows}, {channels}], values as keys and slots [{rows}]; got {list(qkv_BM.shape)}, "
            f"{list(values_BGSD.shape)} and {list(slots_B.shape)}"
        )
    if (cos_BD is None) != (sin_BD is None) or (q_norm_weight is None) != (k_norm_weight is None):
        raise ValueError("cos and sin go together, and so do the two norms: pass both or neither")
    if cos_BD is not None and sin_BD is not None:
        shapes = {cos_BD.shape, sin_BD.shape}
        if shapes != {(rows, width)} or width % 2:
            raise ValueError(f"cos and sin must be [{rows}, {width}], the width even")
    if q_norm_weight is not None and k_norm_weight is not None:
        sizes = (q_norm_weight.numel(), k_norm_weight.numel())
        if sizes not in ((width, width), (num_heads * width, kv_heads * width)):
            raise ValueError(
                f"norm weights must have {width} entries, or {num_heads * width} and "
                f"{kv_heads * width}; got {sizes[0]} and {sizes[1]}"
            )
