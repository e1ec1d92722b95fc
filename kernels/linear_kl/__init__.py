"""Divergence between two language models from hidden states and heads, logits a chunk at a time.

N tokens, D and E hidden widths of student and teacher, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ltconvert.kernels import dispatch

Divergence = Literal["forward", "reverse", "jsd"]

# Bytes of fp32 logits that a chunk may have for one model. The reference holds a chunk of both
# models in the dtype of the matrix products: twice this in fp32, once this in bf16. Each chunk adds
# up a gradient of the head's size, so that small chunks lose time to memory traffic.
CHUNK_BYTES = 128 * 2**20


class LinearKL(NamedTuple):
    """``loss`` has gradients; ``kl`` and ``ce`` are detached means in nats a token.

    ``kl`` is at the temperature and without weights; ``ce`` is 0 without labels; ``tokens`` counts
    those that the KL is a mean over.
    """

    loss: Tensor
    kl: Tensor
    ce: Tensor
    tokens: int


class LinearScores(NamedTuple):
    """A token each, fp32: KL(teacher || student), negative log-likelihoods, equal argmax."""

    kl_N: Tensor
    student_nll_N: Tensor
    teacher_nll_N: Tensor
    agree_N: Tensor


def linear_kl(
    student_hidden_ND: Tensor,
    student_head_VD: Tensor,
    teacher_hidden_NE: Tensor,
    teacher_head_VE: Tensor,
    *,
    mask_N: Tensor | None = None,
    labels_N: Tensor | None = None,
    temperature: float = 1.0,
    divergence: Divergence = "forward",
    beta: float = 0.5,
    kl_weight: float = 1.0,
    ce_weight: float = 0.0,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk_tokens: int | None = None,
    vocab_size: int | None = None,
) -> LinearKL:
    """``loss = kl_weight * temperature^2 * mean KL + ce_weight * mean CE``, to train the student.

    With z = cap(hidden @ head.T) / temperature, p = softmax(teacher z), q = softmax(student z)::

        forward  KL(p || q) = sum p (log p - log q)
        reverse  KL(q || p)
        jsd      beta KL(p || m) + (1 - beta) KL(q || m),  m = beta p + (1 - beta) q

    CE is that of the student at temperature 1 on ``labels_N`` (-100: not counted). ``mask_N`` False
    leaves a token out of both. The mean of the KL is over kept tokens, that of the CE over kept and
    labelled ones. Columns from ``vocab_size`` on are ignored (padded vocabularies; the heads may
    have different numbers of rows). Gradients are computed in the forward pass, so at no time is
    there more than one chunk of logits of each model; matrix products run in the autocast dtype
    where autocast is on, else in that of the hidden states; the softmax in fp32 (fp64 for fp64
    inputs). The head's gradient is added up in fp32. The JSD is that of arXiv 2306.13649.

    Raises:
        ValueError: shapes that do not fit together, or an unknown divergence.
    """
    heads = student_head_VD, teacher_head_VE
    vocab = _check(student_hidden_ND, teacher_hidden_NE, heads, vocab_size, labels_N, mask_N)
    if divergence not in ("forward", "reverse", "jsd"):
        raise ValueError(f"divergence must be 'forward', 'reverse' or 'jsd', got {divergence!r}")
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if ce_weight and labels_N is None:
        raise ValueError(f"ce_weight {ce_weight} needs labels_N, got none")
    return dispatch.implementation("linear_kl", student_hidden_ND.device).linear_kl(
        student_hidden_ND,
        student_head_VD[:vocab],
        teacher_hidden_NE,
        teacher_head_VE[:vocab],
        mask_N=mask_N,
        labels_N=labels_N,
        temperature=temperature,
        divergence=divergence,
        beta=beta,
        kl_weight=kl_weight,
        ce_weight=ce_weight,
        student_softcap=student_softcap,
        teacher_softcap=teacher_softcap,
        chunk_tokens=chunk_tokens or default_chunk(vocab),
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
    heads = student_head_VD, teacher_head_VE
    vocab = _check(student_hidden_ND, teacher_hidden_NE, heads, vocab_size, labels_N)
    return dispatch.implementation("linear_kl", student_hidden_ND.device).linear_scores(
        student_hidden_ND,
        student_head_VD[:vocab],
        teacher_hidden_NE,
        teacher_head_VE[:vocab],
        labels_N,
        student_softcap=student_softcap,
        teacher_softcap=teacher_softcap,
        chunk_tokens=chunk_tokens or default_chunk(vocab),
    )


def default_chunk(vocab_size: int) -> int:
    """Tokens a chunk so that the logits of one model take at most CHUNK_BYTES."""
    return max(16, CHUNK_BYTES // (4 * vocab_size))


def _check(
    student_ND: Tensor,
    teacher_NE: Tensor,
    heads: tuple[Tensor, Tensor],
    vocab_size: int | None,
    labels_N: Tensor | None,
    mask_N: Tensor | None = None,
) -> int:
    """The number of columns to compare; ValueError where something does not fit."""
    if student_ND.dim() != 2 or teacher_NE.dim() != 2 or len(student_ND) != len(teacher_NE):
        raise ValueError(
            "hidden states must be [tokens, width] with equal tokens, got "
            f"{list(student_ND.shape)} and {list(teacher_NE.shape)}"
        )
    for name, hidden, head in zip(
        ("student", "teacher"), (student_ND, teacher_NE), heads, strict=True
    ):
        if head.dim() != 2 or head.shape[1] != hidden.shape[1]:
            raise ValueError(
                f"{name} head must be [vocabulary, {hidden.shape[1]}], got {list(head.shape)}"
            )
    rows = len(heads[0]), len(heads[1])
    if vocab_size is None and rows[0] != rows[1]:
        raise ValueError(
            f"heads have {rows[0]} and {rows[1]} rows; say how many of them are tokens (vocab_size)"
        )
    vocab = rows[0] if vocab_size is None else vocab_size
    if not 0 < vocab <= min(rows):
        raise ValueError(f"vocab_size must be 1 to {min(rows)}, got {vocab}")
    for name, tensor in (("labels", labels_N), ("mask", mask_N)):
        if tensor is not None and tensor.shape != student_ND.shape[:1]:
            raise ValueError(f"{name} must be [{len(student_ND)}], got {list(tensor.shape)}")
    if labels_N is not None and len(labels_N) and int(labels_N.max()) >= vocab:
        raise ValueError(f"labels must be below {vocab}, the vocabulary, got {int(labels_N.max())}")
    return vocab
