"""Attention over packed documents and windows without a mask in memory: PyTorch's flex_attention.

Which blocks of keys a block of queries sees follows from the first and last document of each, so
that it is known on the device, from tensors of T / 128 entries, without anything waiting for it.
Flex attention is fast only where it is compiled; elsewhere SDPA with a mask is used.

B rows, T tokens, K blocks of a row, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK_TOKENS = 128
_HALF = (torch.bfloat16, torch.float16)


def fits(device: torch.device, num_tokens: int) -> bool:
    """Whether block masks pay: half precision on a GPU, whole blocks."""
    return (
        device.type == "cuda"
        and num_tokens % BLOCK_TOKENS == 0
        and torch.is_autocast_enabled("cuda")
        and torch.get_autocast_dtype("cuda") in _HALF
    )


def block_mask(counts_BT: Tensor, window: int | None) -> BlockMask:
    """Causal attention inside each document, over the last ``window`` tokens.

    Args:
        counts_BT: the document of each token, never falling along a row; one row for all will do.
    """
    num_tokens = counts_BT.shape[1]
    blocks_BKt = counts_BT.unflatten(1, (-1, BLOCK_TOKENS))
    first_BK, last_BK = blocks_BKt[..., 0], blocks_BKt[..., -1]
    index_K = torch.arange(first_BK.shape[1], device=counts_BT.device)
    ahead_KK = index_K[:, None] - index_K  # blocks that the queries are ahead of the keys
    some_BKK = (ahead_KK >= 0) & (last_BK[:, None, :] >= first_BK[:, :, None])
    whole_BKK = (ahead_KK > 0) & (first_BK[:, None, :] == last_BK[:, :, None])
    if window is not None:
        some_BKK = some_BKK & ((ahead_KK - 1) * BLOCK_TOKENS + 1 < window)
        whole_BKK = whole_BKK & ((ahead_KK + 1) * BLOCK_TOKENS - 1 < window)

    own = int(counts_BT.shape[0] > 1)  # else one row stands for all

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (counts_BT[row * own, query] == counts_BT[row * own, key])
        return seen if window is None else seen & (query - key < window)

    return BlockMask.from_kv_blocks(
        *_listed(some_BKK & ~whole_BKK),
        *_listed(whole_BKK),
        BLOCK_SIZE=BLOCK_TOKENS,
        mask_mod=sees,
        seq_lengths=(num_tokens, num_tokens),
    )


def flex(
    q_BHTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    mask: BlockMask,
    scale: float,
    cap: float | None,
) -> Tensor:
    """softmax(q.k) v over what the mask shows, [B, H, T, D]; ``cap`` as in Gemma 2."""

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score if cap is None else cap * torch.tanh(score / cap)

    return flex_attention(
        q_BHTD,
        k_BGTD,
        v_BGTD,
        score_mod=None if cap is None else capped,
        block_mask=mask,
        scale=scale,
        enable_gqa=q_BHTD.shape[1] != k_BGTD.shape[1],
    )


def _listed(shown_BKK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each block of queries sees [B, 1, K], and which, those first [B, 1, K, K]."""
    order_BKK = shown_BKK.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return shown_BKK.sum(-1, dtype=torch.int32)[:, None], order_BKK.to(torch.int32)[:, None]
