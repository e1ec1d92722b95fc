"""How the plain PyTorch delta rule cuts a sequence into spans of chunks, and what a chunk needs.

N chunks of a span, B batch, T tokens, H heads, R rows (B * H), C tokens of a chunk, D any width,
K key width, V value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6  # added to the squared length
LEAST_LOG_DECAY = -1000.0  # exp of it is 0 in fp64 as well; keeps -inf - -inf out
# Measured at 9 heads of width 64 on two cores: 16 and 64 tokens a chunk are 5 to 30 % slower, and
# spans four times larger or smaller 10 to 40 % (page faults on one side, overhead on the other).
CHUNK_TOKENS = 32
SPAN_ELEMENTS = 1 << 18  # of q in one span: bounds the temporaries and keeps them near the cores


class Options(NamedTuple):
    """What shapes do not say."""

    scale: float
    l2norm_qk: bool
    chunk: int


class Chunks(NamedTuple):
    """One span, laid out for batched products."""

    q_NRCK: Tensor  # times the scale
    k_NRCK: Tensor
    v_NRCV: Tensor
    beta_NRC1: Tensor
    q_factor_NRC1: Tensor | float  # q = factor * the q that was given
    k_factor_NRC1: Tensor | float
    decay_NRCC: Tensor  # L: decay from token j (column) to token i (row), 0 where j is not read
    carry_NRC1: Tensor  # d: decay of the incoming state up to each token
    inverse_NRCC: Tensor  # (I + A)^-1

    @property
    def to_end_NRC1(self) -> Tensor:
        """Decay from each token to the end of its chunk."""
        return self.decay_NRCC[..., -1, :].unsqueeze(-1)

    @property
    def carry_out_NR11(self) -> Tensor:
        """Decay of the incoming state over the whole chunk."""
        return self.carry_NRC1[..., -1:, :]


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype computed in: fp64 for fp64, fp32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spans(x_BTHD: Tensor, chunk: int) -> list[slice]:
    """Ranges of tokens to work on at a time, each but the last a multiple of `chunk`."""
    batch, length, heads, width = x_BTHD.shape
    tokens = max(1, SPAN_ELEMENTS // (batch * heads * width * chunk)) * chunk
    return [slice(start, min(start + tokens, length)) for start in range(0, length, tokens)]


def to_chunks(x_BTHD: Tensor, span: slice, chunk: int, dtype: torch.dtype) -> Tensor:
    """Copy a span to [N, R, C, D], the last chunk filled up with zeros."""
    batch, _, heads, width = x_BTHD.shape
    x_BTHD = x_BTHD[:, span]
    length = x_BTHD.shape[1]
    if length % chunk:
        x_BTHD = F.pad(x_BTHD, (0, 0, 0, 0, 0, -length % chunk))
    x_NBHCD = x_BTHD.reshape(batch, -1, chunk, heads, width).permute(1, 0, 3, 2, 4)
    x_NBHCD = x_NBHCD.to(dtype, memory_format=torch.contiguous_format, copy=True)
    return x_NBHCD.reshape(-1, batch * heads, chunk, width)


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


def prepare(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor,
    counts_BT: Tensor | None, options: Options, span: slice,
) -> Chunks:  # fmt: skip
    """Everything about a span that does not depend on the incoming state."""
    dtype, chunk = arithmetic(q.dtype), options.chunk
    q_NRCK, k_NRCK, v_NRCV = (to_chunks(x, span, chunk, dtype) for x in (q, k, v))
    beta_NRC1 = to_chunks(beta.unsqueeze(-1), span, chunk, dtype)
    log_decay_NRC1 = to_chunks(log_decay.unsqueeze(-1), span, chunk, torch.float64)
    q_factor: Tensor | float = options.scale
    k_factor: Tensor | float = 1.0
    if options.l2norm_qk:
        q_factor, k_factor = inverse_length(q_NRCK).mul_(options.scale), inverse_length(k_NRCK)
        k_NRCK *= k_factor
    q_NRCK *= q_factor
    decay_NRCC, carry_NRC1 = _decays(log_decay_NRC1, counts_BT, span, dtype)
    a_NRCC = bmm(k_NRCK, k_NRCK.mT).mul_(decay_NRCC).mul_(beta_NRC1)
    # Only the entries below the diagonal are read. A product series for the inverse would need
    # fewer steps, but its terms grow like binomials and cancel: nothing is left of them in fp32.
    eye_CC = torch.eye(chunk, dtype=dtype, device=q.device).expand_as(a_NRCC)
    inverse_NRCC = torch.linalg.solve_triangular(a_NRCC, eye_CC, upper=False, unitriangular=True)
    return Chunks(
        q_NRCK, k_NRCK, v_NRCV, beta_NRC1, q_factor, k_factor, decay_NRCC, carry_NRC1, inverse_NRCC
    )  # fmt: skip


def _decays(
    log_decay_NRC1: Tensor, counts_BT: Tensor | None, span: slice, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(L [N, R, C, C], d [N, R, C, 1]); L is 0 above the diagonal and across segments."""
    chunks, rows, chunk, _ = log_decay_NRC1.shape
    # In fp64: one strong decay must not cost the differences after it their digits.
    total_NRC1 = log_decay_NRC1.clamp(min=LEAST_LOG_DECAY).cumsum(-2)
    decay_NRCC = (total_NRC1 - total_NRC1.mT).to(dtype)
    carry_NRC1 = total_NRC1.exp().to(dtype)
    unread = torch.ones(chunk, chunk, dtype=torch.bool, device=decay_NRCC.device).triu(1)
    if counts_BT is not None:
        batch, length = counts_BT.shape
        position = torch.arange(span.start, span.start + chunks * chunk, device=counts_BT.device)
        counts_NBC = counts_BT[:, position.clamp(max=length - 1)].view(batch, chunks, chunk)
        counts_NBC = counts_NBC.transpose(0, 1)
        before_BT = F.pad(counts_BT, (1, 0))  # 0 before the first token of a row
        before_NB1 = before_BT[:, span.start : span.stop : chunk].t().unsqueeze(-1)
        lost_NBC = (counts_NBC != before_NB1)[:, :, None, :, None]
        carry_NRC1 = (
            carry_NRC1.view(chunks, batch, -1, chunk, 1)
            .masked_fill(lost_NBC, 0)
            .view_as(carry_NRC1)
        )
        unread = unread | (counts_NBC.unsqueeze(-1) != counts_NBC.unsqueeze(-2))
        unread = unread.unsqueeze(2).expand(-1, -1, rows // batch, -1, -1).reshape(decay_NRCC.shape)
    return decay_NRCC.masked_fill_(unread, -torch.inf).exp_(), carry_NRC1


def inverse_length(x: Tensor) -> Tensor:
    """1 / length of the last axis, kept as 1; finite at the zero vector."""
    return dot(x, x).add_(NORM_EPS).rsqrt_()


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner product over the last axis, kept as 1."""
    return (x * y).sum(-1, keepdim=True)


def bmm(x: Tensor, y: Tensor, plus: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """alpha * x @ y over all leading axes, added to `plus` in place when given."""
    if plus is None:
        return torch.bmm(x.flatten(0, 1), y.flatten(0, 1)).unflatten(0, x.shape[:2])
    plus.flatten(0, 1).baddbmm_(x.flatten(0, 1), y.flatten(0, 1), alpha=alpha)
    return plus
