"""Memory and matrix products of the Triton backend: logits of a chunk of tokens at a time.

The logits of a chunk stand in buffers that every chunk uses again. Letters as in the package; c
tokens of a chunk, W columns of a buffer.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

# Matrix products are as fast as they get from about this many tokens on; each chunk more reads and
# writes the head's gradient once more.
MOST_TOKENS = 2048
FEWEST_TOKENS = 128
_ALIGN = 64  # columns; a row then starts where the widest loads and the fastest products want it
_LOGGER = logging.getLogger(__name__)
_stated: set[tuple[int, ...]] = set()


class Logits:
    """Hidden states times head, a chunk at a time, in the dtype of the matrix products."""

    def __init__(
        self, hidden_ND: Tensor, head_VD: Tensor, matmul: torch.dtype | None, size: int
    ) -> None:
        dtype = hidden_ND.dtype if matmul is None else matmul
        self.hidden_ND, self.head_VD = hidden_ND.to(dtype), head_VD.to(dtype)
        self.buffer_cW = hidden_ND.new_empty((size, row_width(len(head_VD))), dtype=dtype)

    def of(self, chunk: slice) -> Tensor:
        """Logits [c, V] whose rows may be read as wide as their stride; the next call's too."""
        z_cV = self.buffer_cW[: chunk.stop - chunk.start, : len(self.head_VD)]
        return torch.mm(self.hidden_ND[chunk], self.head_VD.T, out=z_cV)

    def add_head_gradient(self, dz_cV: Tensor, chunk: slice, grad_VD: Tensor) -> None:
        """The chunk's share added to ``grad_VD`` in fp32; the first chunk's replaces it."""
        hidden_cD, first = self.hidden_ND[chunk], chunk.start == 0
        if grad_VD.dtype == dz_cV.dtype:
            torch.addmm(grad_VD, dz_cV.T, hidden_cD, beta=0 if first else 1, out=grad_VD)
        elif not grad_VD.is_cuda or torch.version.hip:  # products with fp32 results need CUDA
            grad_VD.copy_(dz_cV.T @ hidden_cD) if first else grad_VD.add_(dz_cV.T @ hidden_cD)
        elif first:
            torch.mm(dz_cV.T, hidden_cD, out_dtype=torch.float32, out=grad_VD)
        else:
            torch.addmm(grad_VD, dz_cV.T, hidden_cD, out_dtype=torch.float32, out=grad_VD)


def row_width(vocab: int) -> int:
    """Columns of a buffer for the logits of that many tokens."""
    return -(-vocab // _ALIGN) * _ALIGN


def chunk_size(
    asked: int | None,
    tokens: int,
    vocab: int,
    token_bytes: int,
    device: torch.device,
    reserve: int = 0,
) -> int:
    """Tokens a chunk: what was asked for, or what half of the free memory holds, evenly split.

    ``token_bytes`` are those of one token in all buffers, ``reserve`` those of what is allocated
    besides. The choice is stated once, at level INFO.
    """
    if asked is not None:
        return max(1, min(asked, tokens))
    size = MOST_TOKENS
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        need = min(size, tokens) * token_bytes
        free = torch.cuda.mem_get_info(device)[0] - reserve
        if free < 2 * need:  # the allocator's own reserve is slower to ask for
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if free < 2 * need:
            size = max(FEWEST_TOKENS, free // (2 * token_bytes))
    count = max(1, -(-tokens // size))
    even = -(-tokens // count)
    size = max(1, min(size, tokens, -(-even // FEWEST_TOKENS) * FEWEST_TOKENS))
    if (tokens, vocab, size) not in _stated:
        _stated.add((tokens, vocab, size))
        _LOGGER.info(
            "linear_kl: %d tokens, vocabulary %d: %d tokens a chunk, %.0f MiB of logits",
            tokens, vocab, size, size * token_bytes / 2**20,
        )  # fmt: skip
    return size
