"""The Triton backend's PyTorch custom ops, which torch.compile leaves whole.

Letters as in the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ltconvert.kernels.linear_kl.arguments import Teacher
from ltconvert.kernels.linear_kl.blocks import Options, ranges
from ltconvert.kernels.linear_kl.chunks import Logits, chunk_size, row_width
from ltconvert.kernels.linear_kl.launch import Compare, scores


@torch.library.custom_op("ltconvert::linear_kl", mutates_args=())
def linear_kl(
    student_ND: Tensor,
    student_head_VD: Tensor,
    teacher_NE: Tensor | None,
    teacher_head_VE: Tensor | None,
    teacher_logits_NV: Tensor | None,
    indices_NK: Tensor | None,
    log_probs_NK: Tensor | None,
    mask_N: Tensor | None,
    labels_N: Tensor | None,
    matmul: torch.dtype | None,
    temperature: float,
    divergence: str,
    beta: float,
    kl_weight: float,
    ce_weight: float,
    student_softcap: float | None,
    teacher_softcap: float | None,
    reduction: str,
    chunk_tokens: int | None,
    need_hidden: bool,
    need_head: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss, kl, ce, tokens, factor, gradients over the factor of hidden states and of head)."""
    teacher = Teacher(teacher_NE, teacher_head_VE, teacher_logits_NV, indices_NK, log_probs_NK)
    options = Options(
        temperature, divergence, beta, kl_weight, ce_weight, student_softcap, teacher_softcap,
        reduction,
    )  # fmt: skip
    device = student_ND.device.type
    with torch.cuda.device_of(student_ND), torch.autocast(device, enabled=False):
        if mask_N is not None:
            mask_N = mask_N.bool()
            # A gradient of 0 times a hidden state that is NaN would reach the head's.
            student_ND = student_ND.masked_fill(~mask_N[:, None], 0)
        tokens, shares_2 = _counts(mask_N, labels_N, len(student_ND), student_ND.device)
        weights_2 = shares_2.clone() if reduction == "mean" else torch.ones_like(shares_2)
        weights_2[0] *= kl_weight * temperature
        weights_2[1] *= ce_weight
        # Gradients of logits stay near 1 in size until the end: divided by N, they underflow fp16.
        factor = weights_2.abs().amax()
        factor = torch.where(factor > 0, factor, 1.0)
        weights = (weights_2 / factor).float()
        compare = Compare(teacher, mask_N, labels_N, weights, options, len(student_ND))
        grads = _chunks(
            student_ND, student_head_VD, teacher, compare, matmul, chunk_tokens,
            (need_hidden, need_head),
        )  # fmt: skip
        sums_2 = compare.values_2N.sum(-1, dtype=torch.float64)
        weights_2[0] *= temperature
        loss = (weights_2 * sums_2).sum().float()
        kl, ce = (shares_2 * sums_2).float().unbind()
    return loss, kl.clone(), ce.clone(), tokens, factor.float(), *grads


def _chunks(
    student_ND: Tensor,
    student_head_VD: Tensor,
    teacher: Teacher,
    compare: Compare,
    matmul: torch.dtype | None,
    asked: int | None,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states, in the products' dtype, and of the head, in fp32."""
    tokens, vocab = len(student_ND), len(student_head_VD)
    token_bytes = _itemsize(student_ND, matmul) * row_width(vocab)
    if teacher.hidden_NE is not None:
        token_bytes += _itemsize(teacher.hidden_NE, matmul) * row_width(vocab)
    reserve = 4 * student_head_VD.numel() if needs[1] else 0
    size = chunk_size(asked, tokens, vocab, token_bytes, student_ND.device, reserve)
    student = Logits(student_ND, student_head_VD, matmul, size)
    other = None
    if teacher.hidden_NE is not None and teacher.head_VE is not None:
        other = Logits(teacher.hidden_NE, teacher.head_VE, matmul, size)
    grad_ND, grad_VD = _empty_gradients(student.hidden_ND, student_head_VD, needs)
    if not tokens:
        grad_VD.zero_()
    for chunk in ranges(tokens, size):
        z_cV = student.of(chunk)
        compare(z_cV, None if other is None else other.of(chunk), chunk, any(needs))
        if needs[0]:
            torch.mm(z_cV, student.head_VD, out=grad_ND[chunk])
        if needs[1]:
            student.add_head_gradient(z_cV, chunk, grad_VD)
    return grad_ND, grad_VD


def _empty_gradients(
    hidden_ND: Tensor, head_VD: Tensor, needs: tuple[bool, bool]
) -> tuple[Tensor, Tensor]:
    """Uninitialised; [0] for one that nothing needs."""
    return (
        hidden_ND.new_empty(hidden_ND.shape if needs[0] else 0),
        head_VD.new_empty(head_VD.shape if needs[1] else 0, dtype=torch.float32),
    )


def _counts(
    mask_N: Tensor | None, labels_N: Tensor | None, tokens: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Kept tokens []; one over them and over the kept and labelled ones, fp64 [2]."""
    every = torch.full((), tokens, device=device)
    kept = every if mask_N is None else mask_N.sum()
    labelled = torch.ones_like(every)
    if labels_N is not None:
        labelled = (labels_N >= 0 if mask_N is None else mask_N & (labels_N >= 0)).sum()
    return kept, 1 / torch.stack([kept, labelled]).clamp(min=1).double()


@linear_kl.register_fake
def _(student_ND: Tensor, student_head_VD: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    matmul, needs = arguments[7], arguments[-2:]
    numbers = [student_ND.new_empty((), dtype=torch.float32) for _ in range(4)]
    tokens = student_ND.new_empty((), dtype=torch.int64)
    hidden_ND = torch.empty_like(student_ND, dtype=matmul or student_ND.dtype)
    return *numbers[:3], tokens, numbers[3], *_empty_gradients(hidden_ND, student_head_VD, needs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # Materialised, the gradients of outputs that nothing uses would be zeros of the head's size.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[4:])
    ctx.dtypes, ctx.needs = (inputs[0].dtype, inputs[1].dtype), inputs[-2:]


def _backward(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [None, None]
    if grad_loss is not None:
        factor, *saved = ctx.saved_tensors
        for index, (grad, dtype) in enumerate(zip(saved, ctx.dtypes, strict=True)):
            if ctx.needs[index]:
                # One pass; in fp32, as a product in fp16 underflows where the result would not.
                scaled = torch.empty_like(grad, dtype=dtype)
                grads[index] = torch.mul(grad.float(), grad_loss * factor, out=scaled)
    return *grads, *[None] * (len(ctx.needs_input_grad) - 2)


linear_kl.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("ltconvert::linear_scores", mutates_args=())
def linear_scores(
    student_ND: Tensor,
    student_head_VD: Tensor,
    teacher_NE: Tensor,
    teacher_head_VE: Tensor,
    labels_N: Tensor,
    matmul: torch.dtype | None,
    student_softcap: float | None,
    teacher_softcap: float | None,
    chunk_tokens: int | None,
) -> tuple[Tensor, Tensor]:
    tokens, vocab = len(labels_N), len(student_head_VD)
    widths = (_itemsize(student_ND, matmul), _itemsize(teacher_NE, matmul))
    token_bytes = sum(widths) * row_width(vocab)
    size = chunk_size(chunk_tokens, tokens, vocab, token_bytes, student_ND.device)
    values_3N = student_ND.new_empty((3, tokens), dtype=torch.float32)
    agree_N = student_ND.new_empty(tokens, dtype=torch.bool)
    device = student_ND.device.type
    with torch.cuda.device_of(student_ND), torch.autocast(device, enabled=False):
        student = Logits(student_ND, student_head_VD, matmul, size)
        teacher = Logits(teacher_NE, teacher_head_VE, matmul, size)
        caps = student_softcap, teacher_softcap
        for chunk in ranges(tokens, size):
            z_cV, y_cV = student.of(chunk), teacher.of(chunk)
            scores(z_cV, y_cV, labels_N[chunk], values_3N[:, chunk], agree_N[chunk], caps)
    return values_3N, agree_N


@linear_scores.register_fake
def _(
    student_ND: Tensor, student_head_VD: Tensor,
    teacher_NE: Tensor, teacher_head_VE: Tensor, labels_N: Tensor, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return (
        student_ND.new_empty((3, len(labels_N)), dtype=torch.float32),
        student_ND.new_empty(len(labels_N), dtype=torch.bool),
    )


def _itemsize(tensor: Tensor, matmul: torch.dtype | None) -> int:
    return (matmul or tensor.dtype).itemsize
