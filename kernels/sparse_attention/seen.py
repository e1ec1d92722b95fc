"""Which keys queries see, as a boolean mask of some of them; for plain PyTorch.

B rows, J choices, n queries from a to before b, S keys, W words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.kernels.sparse_attention.bits import unpack

MOST_SCORES = 2**22  # numbers of a chunk's scores; on a GPU, whose launches cost, 8 times as many


def chunks(length: int, scores_a_query: int, device: torch.device) -> list[tuple[int, int]]:
    """First and past-the-last query of chunks whose scores are at most so many numbers."""
    most = MOST_SCORES * (1 if device.type == "cpu" else 8)
    size = max(1, min(length, most // max(1, scores_a_query)))
    return [(first, min(first + size, length)) for first in range(0, length, size)]


def stretch(
    first_BT: Tensor | None, keep_BS: Tensor | None, a: int, b: int, length: int, keys: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Keys of a query's own stretch, [B or 1, n, b's keys]: up to itself, padding left out."""
    columns_n = torch.arange(keys - length + a, keys - length + b, device=device)[:, None]
    keys_S = torch.arange(keys - length + b, device=device)
    seen = (keys_S <= columns_n)[None]
    if first_BT is not None:
        seen = seen & (keys_S >= first_BT[:, a:b, None])
    return seen & kept(keep_BS, columns_n, keys_S)


def kept(keep_BS: Tensor | None, columns_n: Tensor, keys_S: Tensor) -> Tensor:
    """What is no padding, and each query's own key."""
    own_nS = keys_S == columns_n
    if keep_BS is None:
        return torch.ones_like(own_nS)[None]
    return keep_BS[:, None, : len(keys_S)].bool() | own_nS


def seen_keys(
    first_BT: Tensor | None, bits_BJTW: Tensor | None, block_BS: Tensor | None,
    keep_BS: Tensor | None, a: int, b: int, length: int, keys: int, device: torch.device,
    causal: bool = True,
) -> Tensor:  # fmt: skip
    """What ``sparse_attention`` lets queries a to b see, [B or 1, J or 1, n, keys up to b's]."""
    if not causal:
        assert bits_BJTW is not None
        return _chosen(bits_BJTW[:, :, a:b], block_BS, keys)
    if bits_BJTW is None:
        return stretch(first_BT, keep_BS, a, b, length, keys, device)[:, None]
    columns_n = torch.arange(keys - length + a, keys - length + b, device=device)[:, None]
    keys_S = torch.arange(keys - length + b, device=device)
    chosen_BJnS = _chosen(bits_BJTW[:, :, a:b], block_BS, len(keys_S))
    if first_BT is not None:
        chosen_BJnS = chosen_BJnS | (keys_S >= first_BT[:, None, a:b, None])
    allowed_BnS = kept(keep_BS, columns_n, keys_S) & (keys_S <= columns_n)
    return chosen_BJnS & allowed_BnS[:, None]


def _chosen(bits_BJnW: Tensor, block_BS: Tensor | None, keys: int) -> Tensor:
    """Whether each key was chosen for each query, [B, J, n, keys]."""
    if block_BS is None:
        return unpack(bits_BJnW, keys)
    block_BS = block_BS[:, :keys].long()
    at_BJnS = (block_BS.clamp(min=0) // 32)[:, None, None].expand(*bits_BJnW.shape[:3], -1)
    shift_BS = (block_BS.clamp(min=0) % 32).int()
    set_BJnS = (bits_BJnW.gather(3, at_BJnS) >> shift_BS[:, None, None]) & 1
    return set_BJnS.bool() & (block_BS >= 0)[:, None, None]
