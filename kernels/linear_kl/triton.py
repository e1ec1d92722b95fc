"""``linear_kl`` on a GPU: matrix products a chunk at a time, one Triton kernel between them.

Each chunk is two products (logits of both models), one kernel (divergence, and its gradient over
the student's logits) and two products (gradients of hidden states and head). The gradients are made
in the forward pass, kept near 1 in size, and scaled in the backward pass. Nothing waits for the
GPU: means are over counts that stay there, and a masked token keeps its row with weight 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ltconvert.kernels.linear_kl import LinearKL, LinearScores, ops
from ltconvert.kernels.linear_kl.arguments import Teacher


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
    grad = torch.is_grad_enabled()
    loss, kl, ce, tokens, *_ = ops.linear_kl(
        student_ND,
        student_head_VD,
        *teacher,
        mask_N,
        labels_N,
        _autocast(student_ND),
        **options,
        chunk_tokens=chunk_tokens,
        need_hidden=grad and student_ND.requires_grad,
        need_head=grad and student_head_VD.requires_grad,
    )
    return LinearKL(loss, kl, ce, len(student_ND) if mask_N is None else tokens)


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
    teacher_NE, teacher_head_VE = teacher.hidden_NE, teacher.head_VE
    assert teacher_NE is not None and teacher_head_VE is not None
    values_3N, agree_N = ops.linear_scores(
        student_ND,
        student_head_VD,
        teacher_NE,
        teacher_head_VE,
        labels_N,
        _autocast(student_ND),
        student_softcap,
        teacher_softcap,
        chunk_tokens,
    )
    return LinearScores(values_3N[0], values_3N[1], values_3N[2], agree_N)


def _autocast(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks of matrix products; None where it is off."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
