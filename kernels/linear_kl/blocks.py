"""Softmax arithmetic of ``linear_kl``, a few rows of logits at a time, in buffers that are reused.

On a CPU a block is so small that its intermediate values stay in the processor's cache, which makes
the arithmetic several times cheaper than passes over whole fp32 copies of the logits.

c tokens of a chunk, r rows of a block, V vocabulary, K tokens of a top-k. s and t are the logits of
student and teacher over the temperature, q and p their softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ltconvert.kernels.linear_kl.arguments import Teacher

BLOCK_ELEMENTS = 1 << 18  # logits of one model in a block, for each CPU thread; 1 MiB in fp32
ARGMAX_STRIDE = 256
LOWEST = -1e30  # stands for -inf in a teacher's logits: 0 times their difference is then 0, not NaN


@dataclass(frozen=True)
class Options:
    """The options of ``linear_kl`` that are numbers or names."""

    temperature: float
    divergence: str
    beta: float
    kl_weight: float
    ce_weight: float
    student_softcap: float | None
    teacher_softcap: float | None
    reduction: str


def compare(
    z_rV: Tensor,
    teacher: Teacher,
    labels_r: Tensor | None,
    space_4rV: Tensor,
    options: Options,
    weights: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """KL [r] and -log softmax at the labels [r], fp64; the loss's gradient replaces ``z_rV``.

    ``teacher`` has logits or a top-k. ``weights`` are those of the KL over the temperature's logits
    and of the cross-entropy.
    """
    s_rV, t_rV, q_rV, p_rV = space_4rV
    slope_rV = load(z_rV, options.student_softcap, 1.0, s_rV)
    nll_r, dce_rV = torch.zeros((), dtype=torch.float64, device=z_rV.device), None
    if labels_r is not None:
        nll_r, dce_rV = _cross_entropy(s_rV, labels_r, q_rV, weights[1])
    if options.temperature != 1.0:
        s_rV /= options.temperature
    log_sum_s = softmax(s_rV, q_rV)
    if teacher.logits_NV is None:
        kl_r, dz_rV = _topk_kl(s_rV, q_rV, p_rV, log_sum_s, teacher)
    else:
        load(teacher.logits_NV, options.teacher_softcap, options.temperature, t_rV)
        log_sum_t = softmax(t_rV, p_rV)
        kl_r, dz_rV = _DIVERGENCES[options.divergence](
            s_rV, t_rV, q_rV, p_rV, log_sum_s, log_sum_t, options.beta
        )
    if weights[0] != 1.0:
        dz_rV *= weights[0]
    if dce_rV is not None:
        dz_rV += dce_rV
    if slope_rV is not None:
        dz_rV *= slope_rV
    z_rV.copy_(dz_rV)
    return kl_r, nll_r


# The divergences: (KL [r] in fp64, its gradient in s [r, V]), where s and t are logits over the
# temperature, q and p their softmax. All four may be overwritten; the gradient lies in one of them.
# log q = s - log_sum_s is not spelt out: differences of logits keep more digits where the models
# agree, and one softmax costs less than a log_softmax and an exp.


def forward_kl(
    s: Tensor, t: Tensor, q: Tensor, p: Tensor, log_sum_s: Tensor, log_sum_t: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) = sum p (t - s) - log_sum_t + log_sum_s."""
    kl_r = t.sub_(s).mul_(p).sum(-1).double() - (log_sum_t - log_sum_s)
    return kl_r, q.sub_(p)


def _reverse(
    s: Tensor, t: Tensor, q: Tensor, p: Tensor, log_sum_s: Tensor, log_sum_t: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    mean_r1 = torch.mul(s.sub_(t), q, out=p).sum(-1, keepdim=True)
    kl_r = mean_r1[:, 0].double() - (log_sum_s - log_sum_t)
    return kl_r, s.sub_(mean_r1).mul_(q)


def _jsd(
    s: Tensor, t: Tensor, q: Tensor, p: Tensor, log_sum_s: Tensor, log_sum_t: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    log_m = (beta * p).add_(q, alpha=1 - beta).clamp_(min=torch.finfo(p.dtype).tiny).log_()
    s.sub_(log_sum_s[:, None].to(s.dtype)).sub_(log_m)  # log q - log m
    t.sub_(log_sum_t[:, None].to(t.dtype)).sub_(log_m)
    pull_r1 = torch.mul(s, q, out=log_m).sum(-1, keepdim=True)
    kl_r = beta * t.mul_(p).sum(-1).double() + (1 - beta) * pull_r1[:, 0].double()
    return kl_r, s.sub_(pull_r1).mul_(q).mul_(1 - beta)


def _topk_kl(
    s: Tensor, q: Tensor, space: Tensor, log_sum_s: Tensor, teacher: Teacher
) -> tuple[Tensor, Tensor]:
    """Forward KL where all but K tokens are one outcome: (KL [r] in fp64, its gradient in s)."""
    index_rK, log_p_rK = teacher.indices_NK, teacher.log_probs_NK
    assert index_rK is not None and log_p_rK is not None
    log_p_rK = log_p_rK.double()
    p_rK = log_p_rK.exp()
    log_q_rK = s.gather(-1, index_rK).double() - log_sum_s[:, None]
    kl_r = (p_rK * (log_p_rK - log_q_rK)).where(p_rK != 0, 0.0).sum(-1)
    mass_r = p_rK.sum(-1)
    if index_rK.shape[-1] < s.shape[-1]:
        # Summed over the other tokens: 1 - sum q would lose the digits of a small rest.
        log_rest_r = softmax(s.scatter_(-1, index_rK, -torch.inf), space)
        rest_r = (1 - mass_r).clamp(min=0)
        gap_r = rest_r.log() - (log_rest_r - log_sum_s)
        kl_r += (rest_r * gap_r).where(rest_r != 0, 0.0)
        mass_r += rest_r
        space *= rest_r[:, None].to(s.dtype)
    else:
        space.zero_()
    q *= mass_r[:, None].to(s.dtype)
    return kl_r, q.sub_(space.scatter_(-1, index_rK, p_rK.to(s.dtype)))


_DIVERGENCES = {"forward": forward_kl, "reverse": _reverse, "jsd": _jsd}


def _cross_entropy(
    s_rV: Tensor, labels_r: Tensor, space_rV: Tensor, weight: float
) -> tuple[Tensor, Tensor | None]:
    """(-log softmax at the labels [r] in fp64, 0 where below 0; weight times its gradient)."""
    log_sum_r = softmax(s_rV, space_rV)
    labelled_r = labels_r >= 0
    target_r1 = labels_r.clamp(min=0)[:, None]
    nll_r = (log_sum_r - s_rV.gather(-1, target_r1)[:, 0].double()) * labelled_r
    if not weight:
        return nll_r, None
    share_r1 = labelled_r[:, None].to(s_rV.dtype) * weight
    return nll_r, (space_rV * share_r1).scatter_add_(-1, target_r1, -share_r1)


def load(
    raw_rV: Tensor, softcap: float | None, temperature: float, out_rV: Tensor
) -> Tensor | None:
    """Capped logits over the temperature into ``out_rV``; returns the cap's slope, None without."""
    out_rV.copy_(raw_rV)
    slope_rV = None
    if softcap is not None:
        out_rV.div_(softcap).tanh_()
        slope_rV = 1 - out_rV.square()
        out_rV *= softcap
    if temperature != 1.0:
        out_rV /= temperature
    return slope_rV


def softmax(z_rV: Tensor, out_rV: Tensor) -> Tensor:
    """Softmax into ``out_rV``; log sum exp [r] in fp64, read off the most probable entry."""
    torch.softmax(z_rV, -1, out=out_rV)
    return z_rV.amax(-1).double() - out_rV.amax(-1).double().log()


def argmax(z_rV: Tensor) -> Tensor:
    """First index of the largest value, [r]. PyTorch's own is 7 times slower over long rows."""
    if z_rV.device.type != "cpu" or z_rV.shape[-1] % ARGMAX_STRIDE:
        return z_rV.argmax(-1)
    z_rGS = z_rV.unflatten(-1, (-1, ARGMAX_STRIDE))
    group_r = z_rGS.amax(-1).argmax(-1)
    rows_r = torch.arange(len(z_rV))
    return group_r * ARGMAX_STRIDE + z_rGS[rows_r, group_r].argmax(-1)


def ranges(length: int, step: int) -> Iterator[slice]:
    """Consecutive slices of at most ``step`` that cover ``length``."""
    return (slice(i, min(i + step, length)) for i in range(0, length, step))


def blocks(z_cV: Tensor, work: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of rows with room [4, r, V] for each; on a GPU the whole chunk is one."""
    chunk, vocab = z_cV.shape
    rows = chunk
    if z_cV.device.type == "cpu":
        rows = min(chunk, max(1, BLOCK_ELEMENTS * torch.get_num_threads() // vocab))
    space_4rV = z_cV.new_empty((4, rows, vocab), dtype=work)
    for block in ranges(chunk, rows):
        yield block, space_4rV[:, : block.stop - block.start]
