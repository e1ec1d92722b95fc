"""How plain PyTorch cuts a sequence into spans of chunks, for ops with a state of matrices.

N chunks of a span, B batch, T tokens, H heads, R rows (B * H), C tokens of a chunk, D any width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Measured at 9 heads of width 64 on two cores: 16 and 64 tokens a chunk are 5 to 30 % slower, and
# spans four times larger or smaller 10 to 40 % (page faults on one side, overhead on the other).
CHUNK_TOKENS = 32
SPAN_ELEMENTS = 1 << 18  # of q in one span: bounds the temporaries and keeps them near the cores


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype computed in: fp64 for fp64, fp32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spans(x_BTHD: Tensor, chunk: int) -> list[slice]:
    """Ranges of tokens to work on at a time, each but the last a multiple of `chunk`."""
    batch, length, heads, width = x_BTHD.shape
    tokens = max(1, SPAN_ELEMENTS // max(1, batch * heads * width * chunk)) * chunk
    return [slice(start, min(start + tokens, length)) for start in range(0, length, tokens)]


def to_chunks(x_BTHD: Tensor, span: slice, chunk: int, dtype: torch.dtype) -> Tensor:
    """Copy a span to [N, R, C, D], the last chunk filled up with zeros."""
    batch, _, heads, width = x_BTHD.shape
    x_BTHD = x_BTHD[:, span]
    length = x_BTHD.shape[1]
    if length % chunk:
        x_BTHD = F.pad(x_BTHD, (0, 0, 0, 0, 0, -length % chunk))
    x_NBHCD = x_BTHD.reshape(batch, x_BTHD.shape[1] // chunk, chunk, heads, width)
    x_NBHCD = x_NBHCD.permute(1, 0, 3, 2, 4)
    x_NBHCD = x_NBHCD.to(dtype, memory_format=torch.contiguous_format, copy=True)
    return x_NBHCD.reshape(len(x_NBHCD), batch * heads, chunk, width)


def from_chunks(x_NRCD: Tensor, out_BTHD: Tensor, span: slice) -> None:
    """Write [N, R, C, D] into a span of `out_BTHD`; the reverse of `to_chunks`."""
    batch, _, heads, width = out_BTHD.shape
    chunks, _, chunk, _ = x_NRCD.shape
    x_BNCHD = x_NRCD.view(chunks, batch, heads, chunk, width).permute(1, 0, 3, 2, 4)
    length = span.stop - span.start
    if length == chunks * chunk:
        out_BTHD[:, span].unflatten(1, (chunks, chunk)).copy_(x_BNCHD)
    else:
        out_BTHD[:, span] = x_BNCHD.flatten(1, 2)[:, :length]


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product over the last axis, kept as 1."""
    return (x * y).sum(-1, keepdim=True)


def bmm(x: Tensor, y: Tensor, plus: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """x @ y over all leading axes; with `plus`, alpha times that added to it in place."""
    if plus is None:
        return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2])
    plus.flatten(0, 1).baddbmm_(x.flatten(0, 1), y.flatten(0, 1), alpha=alpha)
    return plus
