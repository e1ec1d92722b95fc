"""Divergence between two language models from hidden states and heads, logits a chunk at a time.

N tokens, D and E hidden widths of student and teacher, V vocabulary, K tokens of a cached top-k.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ltconvert.kernels import dispatch, limits
from ltconvert.kernels.linear_kl.arguments import Teacher, check_options, check_tensors

Divergence = Literal["forward", "reverse", "jsd"]
Reduction = Literal["mean", "sum"]

# Bytes of fp32 logits that a chunk may have for one model. The reference holds a chunk of both
# models in the dtype of the matrix products: twice this in fp32, once this in bf16. Each chunk adds
# up a gradient of the head's size, so that small chunks lose time to memory traffic.
CHUNK_BYTES = 128 * 2**20


class LinearKL(NamedTuple):
    """``loss`` has gradients; ``kl`` and ``ce`` are detached means in nats a token.

    ``kl`` is at the temperature and without weights; ``ce`` is 0 without labels; ``tokens`` counts
    those that the KL is a mean over: an int, or a tensor [] where a GPU would have to wait for it.
    """

    loss: Tensor
    kl: Tensor
    ce: Tensor
    tokens: int | Tensor


class LinearScores(NamedTuple):
    """A token each, fp32: KL(teacher || student), negative log-likelihoods, equal argmax."""

    kl_N: Tensor
    student_nll_N: Tensor
    teacher_nll_N: Tensor
    agree_N: Tensor


def linear_kl(
    student_hidden_ND: Tensor,
    student_head_VD: Tensor,
    teacher_hidden_NE: Tensor | None = None,
    teacher_head_VE: Tensor | None = None,
    *,
    teacher_logits_NV: Tensor | None = None,
    teacher_topk: tuple[Tensor, Tensor] | None = None,
    mask_N: Tensor | None = None,
    labels_N: Tensor | None = None,
    temperature: float = 1.0,
    divergence: Divergence = "forward",
    beta: float = 0.5,
    kl_weight: float = 1.0,
    ce_weight: float = 0.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    reduction: Reduction = "mean",
    chunk_tokens: int | None = None,
    vocab_size: int | None = None,
) -> LinearKL:
    """``loss = kl_weight * temperature^2 * mean KL + ce_weight * mean CE``, to train the student.

    With z = cap(hidden @ head.T) / temperature, p = softmax(teacher z), q = softmax(student z)::

        forward  KL(p || q) = sum p (log p - log q)
        reverse  KL(q || p)
        jsd      beta KL(p || m) + (1 - beta) KL(q || m),  m = beta p + (1 - beta) q

    The teacher comes in one of three forms: hidden states and head; ``teacher_logits_NV``, which
    stand for hidden @ head.T (-inf: probability 0); or ``teacher_topk``, token ids [N, K], distinct
    in a row, and their log-probabilities [N, K] at the temperature. Of a top-k, all other tokens
    are one outcome, with P = 1 - sum p and Q = 1 - sum q over the K tokens::

        forward  sum over K of p (log p - log q)  +  P (log P - log Q)

    CE is that of the student at temperature 1 on ``labels_N`` (-100: not counted). ``mask_N`` False
    leaves a token out of both, whatever its values. The mean of the KL is over kept tokens, that of
    the CE over kept and labelled ones; with ``reduction="sum"`` the loss has sums in their place.
    Columns from ``vocab_size`` on are ignored (padded vocabularies; the heads may have different
    numbers of rows). Gradients are computed in the forward pass, so at no time is there more than
    one chunk of logits of each model; matrix products run in the autocast dtype where autocast is
    on, else in that of the hidden states; the softmax in fp32 (fp64 for fp64 inputs, which the
    Triton kernel refuses). The head's gradient is added up in fp32. The JSD is that of arXiv
    2306.13649. ``chunk_tokens`` None leaves the size of a chunk to the backend.

    Raises:
        ValueError: shapes that do not fit together, an unknown divergence or reduction, a teacher
            in no or more than one form, a top-k with another divergence than "forward". On a GPU
            labels past the vocabulary go unnoticed here and make the CE NaN.
    """
    indices_NK, log_probs_NK = teacher_topk or (None, None)
    teacher = Teacher(
        teacher_hidden_NE, teacher_head_VE, teacher_logits_NV, indices_NK, log_probs_NK
    )
    vocab = check_tensors(student_hidden_ND, student_head_VD, teacher, vocab_size, labels_N, mask_N)
    check_options(teacher, labels_N, divergence, temperature, ce_weight, teacher_softcap, reduction)
    return _backend(student_hidden_ND, student_head_VD, *teacher).linear_kl(
        student_hidden_ND,
        _cut(student_head_VD, vocab),
        teacher.cut(vocab),
        mask_N=mask_N,
        labels_N=labels_N,
        temperature=temperature,
        divergence=divergence,
        beta=beta,
        kl_weight=kl_weight,
        ce_weight=ce_weight,
        student_softcap=student_softcap,
        teacher_softcap=teacher_softcap,
        reduction=reduction,
        chunk_tokens=chunk_tokens,
    )


@torch.no_grad()
def linear_scores(
    student_hidden_ND: Tensor,
    student_head_VD: Tensor,
    teacher_hidden_NE: Tensor,
    teacher_head_VE: Tensor,
    labels_N: Tensor,
    *,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk_tokens: int | None = None,
    vocab_size: int | None = None,
) -> LinearScores:
    """Per-token comparison of two models, without gradients; labels_N must all be token ids.

    Raises:
        ValueError: shapes that do not fit together.
    """
    teacher = Teacher(teacher_hidden_NE, teacher_head_VE)
    vocab = check_tensors(student_hidden_ND, student_head_VD, teacher, vocab_size, labels_N)
    return _backend(student_hidden_ND, student_head_VD, *teacher).linear_scores(
        student_hidden_ND,
        _cut(student_head_VD, vocab),
        teacher.cut(vocab),
        labels_N,
        student_softcap=student_softcap,
        teacher_softcap=teacher_softcap,
        chunk_tokens=chunk_tokens,
    )


def default_chunk(vocab_size: int) -> int:
    """Tokens a chunk so that the logits of one model take at most CHUNK_BYTES."""
    return max(16, CHUNK_BYTES // (4 * vocab_size))


def _cut(head_VD: Tensor, vocab: int) -> Tensor:
    """The first rows; the head itself where it has no more, as a slice's gradient is a copy."""
    return head_VD if len(head_VD) == vocab else head_VD[:vocab]


def _backend(student_ND: Tensor, *others: Tensor | None) -> Any:
    limit = limits.of_precision(student_ND, *others)
    return dispatch.implementation("linear_kl", student_ND.device, limit)
