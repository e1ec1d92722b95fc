"""Decay within the chunks of a span, in plain PyTorch: one number a token, or one a key channel.

With G the running sum of log decays in a chunk, row i reads what token j <= i of its segment wrote
times exp(G_i - G_j), and the incoming state, while it lives, times exp(G_i). Log decays are meant
to be <= 0: then no exponential here is of a positive number, however strong the decay.

N chunks of a span, B batch, T tokens, H heads, R rows (B * H), C tokens of a chunk, K key width,
D 1 or K: how many decays a token has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ltconvert.kernels.chunkwise.spans import bmm, dot, to_chunks

LEAST_LOG_DECAY = -1000.0  # exp of it is 0 in fp64 as well; keeps -inf - -inf out


@dataclass(frozen=True)
class ScalarDecay:
    """One decay a token and head.

    Attributes:
        carry_NRCD: decay of the incoming state up to each token, 0 where it does not live.
        to_end_NRCD: decay from each token to the end of its chunk, 0 across segments.
        between_NRCC: decay from token j (column) to token i (row), 0 where j is not read.
    """

    carry_NRCD: Tensor
    to_end_NRCD: Tensor
    between_NRCC: Tensor

    @property
    def carry_out_NRD1(self) -> Tensor:
        """Decay of the incoming state over the whole chunk."""
        return self.carry_NRCD[..., -1:, :].mT

    def products(self, x_NRCK: Tensor, y_NRCK: Tensor) -> Tensor:
        """Decayed inner products of rows of x with rows of y not after them: [N, R, C, C]."""
        return self.weigh(bmm(x_NRCK, y_NRCK.mT))

    def weigh(self, d_NRCC: Tensor) -> Tensor:
        """Make the gradient of `products` fit for `rows` and `columns`, in place."""
        return d_NRCC.mul_(self.between_NRCC)

    def rows(self, d_NRCC: Tensor, y_NRCK: Tensor, plus: Tensor | None = None) -> Tensor:
        """Gradient of x in `products`, added to `plus` in place when given."""
        return bmm(d_NRCC, y_NRCK, plus)

    def columns(self, d_NRCC: Tensor, x_NRCK: Tensor, plus: Tensor, alpha: float = 1.0) -> Tensor:
        """Add alpha times the gradient of y in `products` to `plus`."""
        return bmm(d_NRCC.mT, x_NRCK, plus, alpha)

    def fold(self, x: Tensor) -> Tensor:
        """Sum over key channels, the last axis, what one decay multiplies."""
        return x.sum(-1, keepdim=True)

    def log_gradient(
        self, dsum_NRCD: Tensor, dsum_end_NRD: Tensor, states_NRKV: Tensor, dstates_NRKV: Tensor
    ) -> Tensor:
        """Gradient of the log decays (changes `dsum_NRCD`).

        A running sum G_i multiplies, through exp, everything that row i reads, and divides all
        that rows read of token i: `dsum_NRCD` is rows minus columns. G of the chunk's end also
        carries out what its tokens wrote, `dsum_end_NRD`, and the state that came in: `states` are
        those before each chunk, `dstates` the gradients of those after it.
        """
        kept_NRD = self.fold((states_NRKV * dstates_NRKV).sum(-1))
        dsum_NRCD[..., -1, :] += dsum_end_NRD + self.carry_NRCD[..., -1, :] * kept_NRD
        return dsum_NRCD.flip(-2).cumsum(-2).flip(-2)


@dataclass(frozen=True)
class ChannelDecay(ScalarDecay):
    """One decay a token, head and key channel.

    exp(G_i - G_j) no longer leaves the sum over channels, and exp(G_i) * exp(-G_j) overflows. But
    any token r between the two parts it safely: exp(G_i - G_r) * exp(G_r - G_j). Halving the chunk
    again and again, each pair is parted once, by the last token of a first half.

    Attributes:
        between_NRCC: 1, or 0 where j is not read.
        halvings: of blocks of 2, 4, ... C tokens: (decay between each token and the one that parts
            its block [N, R, C, K], 1 at [i, j] of the pairs that this parts [C, C]).
    """

    halvings: list[tuple[Tensor, Tensor]]

    def products(self, x_NRCK: Tensor, y_NRCK: Tensor) -> Tensor:
        out_NRCC = torch.diag_embed(dot(x_NRCK, y_NRCK).squeeze(-1))
        for near_NRCK, pairs_CC in self.halvings:
            out_NRCC.addcmul_(bmm(x_NRCK * near_NRCK, (y_NRCK * near_NRCK).mT), pairs_CC)
        return self.weigh(out_NRCC)

    def rows(self, d_NRCC: Tensor, y_NRCK: Tensor, plus: Tensor | None = None) -> Tensor:
        plus = torch.zeros_like(y_NRCK) if plus is None else plus
        plus.addcmul_(_diagonal(d_NRCC), y_NRCK)
        for near_NRCK, pairs_CC in self.halvings:
            plus.addcmul_(bmm(d_NRCC * pairs_CC, y_NRCK * near_NRCK), near_NRCK)
        return plus

    def columns(self, d_NRCC: Tensor, x_NRCK: Tensor, plus: Tensor, alpha: float = 1.0) -> Tensor:
        plus.addcmul_(_diagonal(d_NRCC), x_NRCK, value=alpha)
        for near_NRCK, pairs_CC in self.halvings:
            dy_NRCK = bmm((d_NRCC * pairs_CC).mT, x_NRCK * near_NRCK)
            plus.addcmul_(dy_NRCK, near_NRCK, value=alpha)
        return plus

    def fold(self, x: Tensor) -> Tensor:
        return x


def decays(
    log_decay_BTHD: Tensor, counts_BT: Tensor | None, span: slice, chunk: int, dtype: torch.dtype
) -> ScalarDecay:
    """The decays of a span; `chunk` must be a power of two when there is one a channel."""
    # In fp64: one strong decay must not cost the differences after it their digits.
    log_decay_NRCD = to_chunks(log_decay_BTHD, span, chunk, torch.float64)
    total_NRCD = log_decay_NRCD.clamp_(min=LEAST_LOG_DECAY).cumsum(-2)
    carry_NRCD = total_NRCD.to(dtype, copy=True).exp_()
    lost, unread = _out_of_reach(counts_BT, span, carry_NRCD)
    if lost is not None:
        carry_NRCD.masked_fill_(lost, 0)
    if log_decay_BTHD.shape[-1] == 1:
        between_NRCC = (total_NRCD - total_NRCD.mT).to(dtype)
        between_NRCC = between_NRCC.masked_fill_(unread, -torch.inf).exp_()
        return ScalarDecay(carry_NRCD, between_NRCC[..., -1, :].unsqueeze(-1), between_NRCC)
    between_NRCC = (~unread).to(dtype)
    to_end_NRCD = (total_NRCD[..., -1:, :] - total_NRCD).to(dtype).exp_()
    to_end_NRCD *= between_NRCC[..., -1, :].unsqueeze(-1)
    halvings = [_halving(total_NRCD, 1 << level, dtype) for level in range(chunk.bit_length() - 1)]
    return ChannelDecay(carry_NRCD, to_end_NRCD, between_NRCC, halvings)


def _halving(total_NRCK: Tensor, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One of `ChannelDecay.halvings`, of blocks of twice `half` tokens."""
    blocks = total_NRCK.unflatten(-2, (-1, 2 * half))
    gaps = (blocks - blocks[..., half - 1 : half, :]).to(dtype)
    gaps[..., :half, :].neg_()
    position_C = torch.arange(total_NRCK.shape[-2], device=total_NRCK.device)
    block_C, second_C = position_C // (2 * half), position_C % (2 * half) >= half
    pairs_CC = (block_C.unsqueeze(-1) == block_C) & second_C.unsqueeze(-1) & ~second_C
    return gaps.exp_().flatten(-3, -2), pairs_CC.to(dtype)


def _out_of_reach(
    counts_BT: Tensor | None, span: slice, like_NRCD: Tensor
) -> tuple[Tensor | None, Tensor]:
    """(where the incoming state is gone [N, R, C, 1] or None, where row i does not read j)."""
    chunks, rows, chunk, _ = like_NRCD.shape
    unread = torch.ones(chunk, chunk, dtype=torch.bool, device=like_NRCD.device).triu(1)
    if counts_BT is None:
        return None, unread
    batch, length = counts_BT.shape
    position = torch.arange(span.start, span.start + chunks * chunk, device=counts_BT.device)
    counts_NBC = counts_BT[:, position.clamp(max=length - 1)].view(batch, chunks, chunk)
    counts_NBC = counts_NBC.transpose(0, 1)
    before_BT = F.pad(counts_BT, (1, 0))  # 0 before the first token of a row
    before_NB1 = before_BT[:, span.start : span.stop : chunk].t().unsqueeze(-1)
    lost_NBC = counts_NBC != before_NB1
    unread = unread | (counts_NBC.unsqueeze(-1) != counts_NBC.unsqueeze(-2))
    heads = rows // batch
    lost_NRC = lost_NBC.repeat_interleave(heads, dim=1)
    return lost_NRC.unsqueeze(-1), unread.repeat_interleave(heads, dim=1)


def _diagonal(d_NRCC: Tensor) -> Tensor:
    return d_NRCC.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
