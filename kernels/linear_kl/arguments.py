"""What ``linear_kl`` and ``linear_scores`` accept: the forms of a teacher, and shapes that fit.

Letters as in the package.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ltconvert.kernels.segments import can_look

DIVERGENCES = ("forward", "reverse", "jsd")


class Teacher(NamedTuple):
    """One of three forms: final hidden states with their head, logits, or some log-probabilities.

    Indices [N, K] are of distinct tokens; log-probabilities [N, K] are over the whole vocabulary.
    """

    hidden_NE: Tensor | None = None
    head_VE: Tensor | None = None
    logits_NV: Tensor | None = None
    indices_NK: Tensor | None = None
    log_probs_NK: Tensor | None = None

    def cut(self, vocab: int) -> Teacher:
        """Without gradients, and without the columns from ``vocab`` on."""
        detached = Teacher(*(None if x is None else x.detach() for x in self))
        head_VE, logits_NV = detached.head_VE, detached.logits_NV
        if head_VE is not None:
            return detached._replace(head_VE=head_VE[:vocab])
        return detached if logits_NV is None else detached._replace(logits_NV=logits_NV[:, :vocab])

    def rows(self, which: Tensor | slice) -> Teacher:
        """Those tokens alone; the head stays whole."""
        return Teacher(
            *(
                x if x is None or name == "head_VE" else x[which]
                for name, x in zip(self._fields, self, strict=True)
            )
        )


def check_options(
    teacher: Teacher,
    labels_N: Tensor | None,
    divergence: str,
    temperature: float,
    ce_weight: float,
    teacher_softcap: float | None,
    reduction: str,
) -> None:
    """ValueError for a name that is unknown, or a combination that has no meaning."""
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence must be 'forward', 'reverse' or 'jsd', got {divergence!r}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    if ce_weight and labels_N is None:
        raise ValueError(f"ce_weight {ce_weight} needs labels_N, got none")
    if teacher.indices_NK is not None and divergence != "forward":
        raise ValueError(
            f"teacher_topk knows no probability of the other tokens, which divergence "
            f"{divergence!r} needs; use 'forward'"
        )
    if teacher.indices_NK is not None and teacher_softcap is not None:
        raise ValueError("teacher_softcap caps logits; teacher_topk holds log-probabilities")


def check_tensors(
    student_ND: Tensor,
    student_head_VD: Tensor,
    teacher: Teacher,
    vocab_size: int | None,
    labels_N: Tensor | None,
    mask_N: Tensor | None = None,
) -> int:
    """The number of columns to compare; ValueError where something does not fit."""
    _check_one_form(teacher)
    found = teacher.hidden_NE, teacher.logits_NV, teacher.indices_NK
    given = next(x for x in found if x is not None)
    if student_ND.dim() != 2 or given.dim() != 2 or len(student_ND) != len(given):
        raise ValueError(
            "student and teacher must be [tokens, width] with equal tokens, got "
            f"{list(student_ND.shape)} and {list(given.shape)}"
        )
    _check_head("student", student_ND, student_head_VD)
    rows = [len(student_head_VD)]
    if teacher.hidden_NE is not None and teacher.head_VE is not None:
        _check_head("teacher", teacher.hidden_NE, teacher.head_VE)
        rows.append(len(teacher.head_VE))
    if teacher.logits_NV is not None:
        rows.append(teacher.logits_NV.shape[1])
    if vocab_size is None and rows[0] != rows[-1]:
        raise ValueError(
            f"vocabularies have {rows[0]} and {rows[-1]} rows; say how many of them are tokens "
            "(vocab_size)"
        )
    vocab = rows[0] if vocab_size is None else vocab_size
    if not 0 < vocab <= min(rows):
        raise ValueError(f"vocab_size must be 1 to {min(rows)}, got {vocab}")
    for name, tensor in (("labels", labels_N), ("mask", mask_N)):
        if tensor is not None and tensor.shape != student_ND.shape[:1]:
            raise ValueError(f"{name} must be [{len(student_ND)}], got {list(tensor.shape)}")
    _check_topk(teacher.indices_NK, teacher.log_probs_NK, vocab)
    if labels_N is not None:
        _check_below("labels", labels_N, vocab)
    return vocab


def _check_one_form(teacher: Teacher) -> None:
    if (teacher.hidden_NE is None) != (teacher.head_VE is None):
        raise ValueError("teacher_hidden_NE and teacher_head_VE come together, got one of them")
    forms = teacher.hidden_NE, teacher.logits_NV, teacher.indices_NK
    if sum(x is not None for x in forms) != 1:
        raise ValueError(
            "the teacher must be given once: as teacher_hidden_NE with teacher_head_VE, as "
            "teacher_logits_NV or as teacher_topk"
        )


def _check_head(name: str, hidden: Tensor, head: Tensor) -> None:
    if head.dim() != 2 or head.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"{name} head must be [vocabulary, {hidden.shape[1]}], got {list(head.shape)}"
        )


def _check_topk(indices_NK: Tensor | None, log_probs_NK: Tensor | None, vocab: int) -> None:
    if indices_NK is None or log_probs_NK is None:
        return
    if indices_NK.shape != log_probs_NK.shape or not 0 < indices_NK.shape[1] <= vocab:
        raise ValueError(
            f"teacher_topk must be two of [tokens, 1 to {vocab}], got {list(indices_NK.shape)} "
            f"and {list(log_probs_NK.shape)}"
        )
    _check_below("teacher_topk indices", indices_NK, vocab)


def _check_below(name: str, ids: Tensor, vocab: int) -> None:
    """Only on a CPU: looking at values makes a GPU wait and breaks a compiled graph."""
    if not can_look(ids) or not ids.numel():
        return
    if int(ids.max()) >= vocab:
        raise ValueError(f"{name} must be below {vocab}, the vocabulary, got {int(ids.max())}")
