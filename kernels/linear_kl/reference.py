"""``linear_kl`` in plain PyTorch: chunks of tokens, gradients by formula in the forward pass.

Matrix products take a chunk of tokens at a time. The logits they give stay in the products' own
dtype; the softmax arithmetic, in fp32, takes a few rows of them at a time (``blocks``) and writes
the gradient over the student's logits. What stands in memory at most is thus one chunk of logits
of each model in the products' dtype, and the gradients.

c tokens of a chunk, r rows of a block; the other letters as in the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ltconvert.kernels.linear_kl import LinearKL, LinearScores, default_chunk
from ltconvert.kernels.linear_kl.arguments import Teacher
from ltconvert.kernels.linear_kl.blocks import (
    LOWEST,
    Options,
    argmax,
    blocks,
    compare,
    forward_kl,
    load,
    ranges,
    softmax,
)


def linear_kl(
    student_ND: Tensor,
    student_head_VD: Tensor,
    teacher: Teacher,
    *,
    mask_N: Tensor | None,
    labels_N: Tensor | None,
    chunk_tokens: int | None,
    **options: Any,
) -> LinearKL:
    """See ``ltconvert.kernels.linear_kl.linear_kl``; ``teacher`` is without gradients."""
    if mask_N is not None and not bool(mask_N.all()):
        kept = mask_N.nonzero()[:, 0]
        student_ND, teacher = student_ND[kept], teacher.rows(kept)
        labels_N = None if labels_N is None else labels_N[kept]
    size = chunk_tokens or default_chunk(len(student_head_VD))
    loss, kl, ce = _LinearKL.apply(
        student_ND, student_head_VD, teacher, labels_N, Options(**options), size
    )
    return LinearKL(loss, kl, ce, len(student_ND))


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        student_ND: Tensor,
        student_head_VD: Tensor,
        teacher: Teacher,
        labels_N: Tensor | None,
        options: Options,
        size: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        student, rows_of = _Product(student_ND, student_head_VD), _Rows(teacher)
        tokens = max(1, len(student_ND))
        labelled = 1 if labels_N is None else max(1, int((labels_N >= 0).sum()))
        shares = (1 / tokens, 1 / labelled) if options.reduction == "mean" else (1.0, 1.0)
        weights = options.kl_weight * options.temperature * shares[0], options.ce_weight * shares[1]
        # Gradients of logits stay near 1 in size until the end: divided by N, they underflow fp16.
        ctx.factor = max(map(abs, weights)) or 1.0
        weights = weights[0] / ctx.factor, weights[1] / ctx.factor
        need_hidden, need_head = ctx.needs_input_grad[:2]
        grad_ND = torch.empty_like(student_ND) if need_hidden else None
        grad_VD = torch.zeros_like(student_head_VD, dtype=student.work) if need_head else None
        kl = torch.zeros((), dtype=torch.float64, device=student_ND.device)
        ce = torch.zeros_like(kl)
        with torch.autocast(student_ND.device.type, enabled=False):
            for chunk in ranges(len(student_ND), size):
                z_cV, teacher_c = student.logits(chunk), rows_of.chunk(chunk)
                labels_c = None if labels_N is None else labels_N[chunk]
                for rows, space_4rV in blocks(z_cV, student.work):
                    labels_r = None if labels_c is None else labels_c[rows]
                    kl_r, nll_r = compare(
                        z_cV[rows], teacher_c.rows(rows), labels_r, space_4rV, options, weights
                    )
                    kl += kl_r.sum()
                    ce += nll_r.sum()
                student.backward(z_cV, chunk, grad_ND, grad_VD)
        loss = options.kl_weight * options.temperature**2 * shares[0] * kl
        loss = loss + options.ce_weight * shares[1] * ce
        ctx.save_for_backward(
            grad_ND, None if grad_VD is None else grad_VD.to(student_head_VD.dtype)
        )
        means = kl / tokens, ce / labelled
        result = (loss.to(student.work), means[0].to(student.work), means[1].to(student.work))
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_loss * ctx.factor
        grads = (None if g is None else (g * scale).to(g.dtype) for g in ctx.saved_tensors)
        return (*grads, None, None, None, None)


class _Product:
    """Hidden states times head, a chunk at a time, in the dtype that autocast asks for.

    Both are cast once.
    """

    def __init__(self, hidden_ND: Tensor, head_VD: Tensor) -> None:
        self.work = torch.promote_types(hidden_ND.dtype, torch.float32)
        device, matmul = hidden_ND.device.type, hidden_ND.dtype
        if torch.is_autocast_enabled(device) and matmul != torch.float64:
            matmul = torch.get_autocast_dtype(device)
        self.hidden_ND, self.head_VD = hidden_ND.to(matmul), head_VD.to(matmul)

    def logits(self, rows: slice) -> Tensor:
        """Logits [c, V], not capped."""
        return F.linear(self.hidden_ND[rows], self.head_VD)

    def backward(
        self, dz_cV: Tensor, rows: slice, grad_ND: Tensor | None, grad_VD: Tensor | None
    ) -> None:
        """Gradient of the chunk's logits into those of hidden states and head."""
        if grad_ND is not None:
            grad_ND[rows] = dz_cV @ self.head_VD
        if grad_VD is not None:
            grad_VD += dz_cV.T @ self.hidden_ND[rows]


class _Rows:
    """The teacher, a chunk at a time: logits where it came with hidden states, else as it came."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher, self.product = teacher, None
        if teacher.hidden_NE is not None and teacher.head_VE is not None:
            self.product = _Product(teacher.hidden_NE, teacher.head_VE)

    def chunk(self, rows: slice) -> Teacher:
        """Logits [c, V] or a top-k [c, K]."""
        if self.product is not None:
            return Teacher(logits_NV=self.product.logits(rows))
        given = self.teacher.rows(rows)
        if given.logits_NV is None:
            return given
        return Teacher(logits_NV=given.logits_NV.clamp(min=_lowest(given.logits_NV.dtype)))


def _lowest(dtype: torch.dtype) -> float:
    return max(LOWEST, torch.finfo(dtype).min)


def linear_scores(
    student_ND: Tensor,
    student_head_VD: Tensor,
    teacher: Teacher,
    labels_N: Tensor,
    *,
    student_softcap: float | None,
    teacher_softcap: float | None,
    chunk_tokens: int | None,
) -> LinearScores:
    """See ``ltconvert.kernels.linear_kl.linear_scores``."""
    student, rows_of = _Product(student_ND, student_head_VD), _Rows(teacher)
    kl_N, student_nll_N, teacher_nll_N = torch.empty(
        (3, len(labels_N)), dtype=student.work, device=student_ND.device
    )
    agree_N = torch.empty(len(labels_N), dtype=torch.bool, device=student_ND.device)
    with torch.autocast(student_ND.device.type, enabled=False):
        for chunk in ranges(len(labels_N), chunk_tokens or default_chunk(len(student_head_VD))):
            z_cV, y_cV = student.logits(chunk), rows_of.chunk(chunk).logits_NV
            assert y_cV is not None
            for rows, (s_rV, t_rV, q_rV, p_rV) in blocks(z_cV, student.work):
                at = slice(chunk.start + rows.start, chunk.start + rows.stop)
                load(z_cV[rows], student_softcap, 1.0, s_rV)
                load(y_cV[rows], teacher_softcap, 1.0, t_rV)
                log_sum_s, log_sum_t = softmax(s_rV, q_rV), softmax(t_rV, p_rV)
                label_r1 = labels_N[at][:, None]
                student_nll_N[at] = log_sum_s - s_rV.gather(-1, label_r1)[:, 0]
                teacher_nll_N[at] = log_sum_t - t_rV.gather(-1, label_r1)[:, 0]
                agree_N[at] = argmax(s_rV) == argmax(t_rV)
                kl_N[at] = forward_kl(s_rV, t_rV, q_rV, p_rV, log_sum_s, log_sum_t, 0.0)[0]
    return LinearScores(kl_N, student_nll_N, teacher_nll_N, agree_N)
