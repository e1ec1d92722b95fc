"""``linear_kl`` in plain PyTorch: chunks of tokens, gradients by formula in the forward pass.

c tokens of a chunk; the other letters as in the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ltconvert.kernels.linear_kl import LinearKL, LinearScores


@dataclass(frozen=True)
class _Options:
    temperature: float
    divergence: str
    beta: float
    kl_weight: float
    ce_weight: float
    student_softcap: float | None
    teacher_softcap: float | None
    chunk_tokens: int


def linear_kl(
    student_ND: Tensor,
    student_head_VD: Tensor,
    teacher_NE: Tensor,
    teacher_head_VE: Tensor,
    *,
    mask_N: Tensor | None,
    labels_N: Tensor | None,
    **options: Any,
) -> LinearKL:
    """See ``ltconvert.kernels.linear_kl.linear_kl``."""
    if mask_N is not None and not bool(mask_N.all()):
        kept = mask_N.nonzero()[:, 0]
        student_ND, teacher_NE = student_ND[kept], teacher_NE[kept]
        labels_N = None if labels_N is None else labels_N[kept]
    loss, kl, ce = _LinearKL.apply(
        student_ND, student_head_VD, teacher_NE.detach(), teacher_head_VE.detach(), labels_N, _Options(**options)
    )
    return LinearKL(loss, kl, ce, len(student_ND))


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student_ND: Tensor,
        student_head_VD: Tensor,
        teacher_NE: Tensor,
        teacher_head_VE: Tensor,
        labels_N: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        student = _Logits(student_ND, student_head_VD, options.student_softcap)
        teacher = _Logits(teacher_NE, teacher_head_VE, options.teacher_softcap)
        tokens = max(1, len(student_ND))
        labelled = 1 if labels_N is None else max(1, int((labels_N >= 0).sum()))
        need_hidden, need_head = ctx.needs_input_grad[:2]
        grad_ND = torch.empty_like(student_ND) if need_hidden else None
        grad_VD = torch.zeros_like(student_head_VD, dtype=student.work) if need_head else None
        kl = torch.zeros((), dtype=torch.float64, device=student_ND.device)
        ce = torch.zeros_like(kl)
        for start in range(0, len(student_ND), options.chunk_tokens):
            rows = slice(start, start + options.chunk_tokens)
            z_cV, slope_cV = student.chunk(rows)
            kl_c, dz_cV = _divergence(z_cV, teacher.chunk(rows)[0], options)
            kl += kl_c.sum(dtype=torch.float64)
            # d(temperature^2 KL)/dz = temperature * d KL / d(z / temperature)
            dz_cV *= options.kl_weight * options.temperature / tokens
            if labels_N is not None:
                ce += _add_cross_entropy(z_cV, labels_N[rows], options.ce_weight / labelled, dz_cV)
            if slope_cV is not None:
                dz_cV *= slope_cV
            student.backward(dz_cV, rows, grad_ND, grad_VD)
        kl, ce = kl / tokens, ce / labelled
        loss = options.kl_weight * options.temperature**2 * kl + options.ce_weight * ce
        ctx.save_for_backward(grad_ND, None if grad_VD is None else grad_VD.to(student_head_VD.dtype))
        result = (loss.to(student.work), kl.to(student.work), ce.to(student.work))
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if g is None else g * grad_loss.to(g.dtype) for g in ctx.saved_tensors)
        return (*grads, None, None, None, None)


class _Logits:
    """One model's logits, a chunk at a time; its head is cast once."""

    def __init__(self, hidden_ND: Tensor, head_VD: Tensor, softcap: float | None) -> None:
        self.softcap = softcap
        self.work = torch.promote_types(hidden_ND.dtype, torch.float32)
        device = hidden_ND.device.type
        matmul = hidden_ND.dtype
        if torch.is_autocast_enabled(device) and matmul != torch.float64:
            matmul = torch.get_autocast_dtype(device)
        self.hidden_ND, self.head_VD = hidden_ND.to(matmul), head_VD.to(matmul)

    def chunk(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Logits [c, V] and, with a soft cap, their slope in the uncapped ones."""
        with torch.autocast(self.hidden_ND.device.type, enabled=False):
            z_cV = F.linear(self.hidden_ND[rows], self.head_VD).to(self.work)
        if self.softcap is None:
            return z_cV, None
        tanh_cV = torch.tanh_(z_cV / self.softcap)
        return self.softcap * tanh_cV, 1 - tanh_cV.square()

    def backward(
        self, dz_cV: Tensor, rows: slice, grad_ND: Tensor | None, grad_VD: Tensor | None
    ) -> None:
        """Gradient of the chunk's logits into those of hidden states and head."""
        with torch.autocast(self.hidden_ND.device.type, enabled=False):
            dz_cV = dz_cV.to(self.hidden_ND.dtype)
            if grad_ND is not None:
                grad_ND[rows] = (dz_cV @ self.head_VD).to(grad_ND.dtype)
            if grad_VD is not None:
                grad_VD += dz_cV.T @ self.hidden_ND[rows]


def _divergence(student_cV: Tensor, teacher_cV: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
    """KL [c] and its gradient in the student's logits over the temperature [c, V]."""
    log_q = torch.log_softmax(student_cV / options.temperature, -1)
    log_p = torch.log_softmax(teacher_cV / options.temperature, -1)
    q = log_q.exp()
    if options.divergence == "forward":
        p = log_p.exp()
        kl_c = (p * log_p.sub_(log_q)).sum(-1)
        return kl_c, q.sub_(p)
    if options.divergence == "reverse":
        gap = log_q.sub_(log_p)
        kl_c = (q * gap).sum(-1)
        return kl_c, q * (gap - kl_c[:, None])
    beta, p = options.beta, log_p.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    student_gap = torch.where(q > 0, log_q - log_m, 0)
    teacher_gap = torch.where(p > 0, log_p - log_m, 0)
    pull_c = (q * student_gap).sum(-1)
    kl_c = beta * (p * teacher_gap).sum(-1) + (1 - beta) * pull_c
    return kl_c, (1 - beta) * q * (student_gap - pull_c[:, None])


def _add_cross_entropy(z_cV: Tensor, labels_c: Tensor, weight: float, dz_cV: Tensor) -> Tensor:
    """Sum of -log softmax at the labels (below 0: none), its gradient added to ``dz_cV``."""
    labelled = labels_c >= 0
    target_c1 = labels_c.clamp(min=0)[:, None]
    log_q = torch.log_softmax(z_cV, -1)
    picked_c = log_q.gather(-1, target_c1)[:, 0]
    if weight:
        share_c1 = labelled[:, None].to(z_cV.dtype) * weight
        dz_cV.addcmul_(log_q.exp_(), share_c1)
        dz_cV.scatter_add_(-1, target_c1, -share_c1)
    return -(picked_c * labelled).sum(dtype=torch.float64)


def linear_scores(
    student_ND: Tensor,
    student_head_VD: Tensor,
    teacher_NE: Tensor,
    teacher_head_VE: Tensor,
    labels_N: Tensor,
    *,
    student_softcap: float | None,
    teacher_softcap: float | None,
    chunk_tokens: int,
) -> LinearScores:
    """See ``ltconvert.kernels.linear_kl.linear_scores``."""
    student = _Logits(student_ND, student_head_VD, student_softcap)
    teacher = _Logits(teacher_NE, teacher_head_VE, teacher_softcap)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, len(labels_N), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        label_c1 = labels_N[rows][:, None]
        log_q = torch.log_softmax(student.chunk(rows)[0], -1)
        log_p = torch.log_softmax(teacher.chunk(rows)[0], -1)
        agree_c = log_q.argmax(-1) == log_p.argmax(-1)
        nll_c = (-log_q.gather(-1, label_c1)[:, 0], -log_p.gather(-1, label_c1)[:, 0])
        kl_c = (log_p.exp() * (log_p - log_q)).sum(-1)
        parts.append((kl_c, *nll_c, agree_c))
    if not parts:
        empty = torch.zeros(0, device=student_ND.device)
        return LinearScores(empty, empty, empty, empty.bool())
    return LinearScores(*(torch.cat(column) for column in zip(*parts, strict=True)))
