"""KL of several models to one teacher, from their final hidden states and one head each.

``kernels.linear_kl.linear_scores`` compares two models and computes the teacher's logits each time.
Scoring layers compares dozens of changed models with the same teacher on the same tokens: here a
chunk's teacher logits serve all of them, and the buffers of a chunk are used again. On a CPU the
logits are the larger part of the cost.

Shape letters: N tokens, C hidden width, V vocabulary, n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.kernels.linear_kl import default_chunk


@torch.no_grad()
def kl_sums(
    student: LT2ForCausalLM,
    students_NC: Sequence[Tensor],
    teacher: LT2ForCausalLM,
    teacher_NC: Tensor,
) -> list[float]:
    """KL(teacher || student) in nats, summed over N tokens, for each of ``students_NC``.

    Hidden states equal to the teacher's through an equal head give exactly 0. Logits exist for one
    chunk of tokens of two models at a time; columns past the smaller vocabulary are left out.
    """
    vocab = min(student.config.vocab_size, teacher.config.vocab_size)
    totals = [0.0] * len(students_NC)
    size = default_chunk(vocab)
    heads = [_Head(model, vocab, min(size, len(teacher_NC))) for model in (teacher, student)]
    for start in range(0, len(teacher_NC), size):
        rows = slice(start, start + size)
        log_p_nV = heads[0].log_probs(teacher_NC[rows])
        p_nV = log_p_nV.exp()
        for index, hidden_NC in enumerate(students_NC):
            gap_nV = heads[1].log_probs(hidden_NC[rows]).sub_(log_p_nV)
            kl_n = -torch.bmm(p_nV[:, None], gap_nV[:, :, None])
            totals[index] += float(kl_n.sum(dtype=torch.float64))
    return totals


class _Head:
    """Log-probabilities of one model, written into the same memory for every chunk."""

    def __init__(self, model: LT2ForCausalLM, vocab: int, rows: int) -> None:
        weight_VC = model.head_weight[:vocab]
        device = weight_VC.device
        self.dtype = weight_VC.dtype
        if torch.is_autocast_enabled(device.type) and self.dtype != torch.float64:
            self.dtype = torch.get_autocast_dtype(device.type)
        self.weight_VC, self.softcap = weight_VC.to(self.dtype), model.config.final_softcap
        work = torch.promote_types(weight_VC.dtype, torch.float32)
        self.logits_nV = torch.empty(rows, vocab, dtype=self.dtype, device=device)
        self.work_nV = torch.empty(rows, vocab, dtype=work, device=device)
        self.result_nV = torch.empty_like(self.work_nV)

    def log_probs(self, hidden_nC: Tensor) -> Tensor:
        """[n, V]; valid until the next call."""
        count, device = len(hidden_nC), hidden_nC.device.type
        with torch.autocast(device, enabled=False):
            logits_nV, work_nV = self.logits_nV[:count], self.work_nV[:count]
            torch.mm(hidden_nC.to(self.dtype), self.weight_VC.T, out=logits_nV)
            work_nV.copy_(logits_nV)
            if self.softcap is not None:
                work_nV.div_(self.softcap).tanh_().mul_(self.softcap)
            return torch.log_softmax(work_nV, -1, out=self.result_nV[:count])
