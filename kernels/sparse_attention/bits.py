"""Sets as words of 32 bits: member n is bit ``n % 32`` of word ``n // 32``.

A set of chosen keys for every query is a 32nd of what their scores would take.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

WORD_BITS = 32


def words_for(members: int) -> int:
    """Words that hold a set of so many possible members; at least one."""
    return max(1, -(-members // WORD_BITS))


def pack(mask: Tensor) -> Tensor:
    """Boolean [..., N] -> int32 [..., ``words_for(N)``]."""
    size = mask.shape[-1]
    mask = F.pad(mask, (0, words_for(size) * WORD_BITS - size))
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=mask.device)
    return (mask.unflatten(-1, (-1, WORD_BITS)).int() << shifts).sum(-1, dtype=torch.int32)


def unpack(words: Tensor, size: int) -> Tensor:
    """int32 [..., W] -> boolean [..., ``size``]."""
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 1).bool().flatten(-2)[..., :size]


def union(words: Tensor, dim: int) -> Tensor:
    """Union of sets along an axis, which goes."""
    words = words.movedim(dim, 0)
    while (count := len(words)) > 1:
        half = count // 2
        joined = words[:half] | words[half : 2 * half]
        words = joined if count % 2 == 0 else torch.cat([joined, words[2 * half :]])
    return words[0]
