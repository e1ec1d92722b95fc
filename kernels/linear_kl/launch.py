"""Launches of the Triton kernels of ``linear_kl`` over the rows of a chunk.

Letters as in the package; c tokens of a chunk.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ltconvert.kernels.linear_kl.arguments import DIVERGENCES, Teacher
from ltconvert.kernels.linear_kl.blocks import Options
from ltconvert.kernels.linear_kl.rows import compare_rows
from ltconvert.kernels.linear_kl.tail import compare_tails, score_rows


class Compare:
    """Divergence of a chunk's logits and its gradient, with what stays the same over chunks.

    ``values_2N`` collects KL and -log softmax at the labels, 0 where a token does not count.
    ``weights_2`` are those of the KL over the temperature's logits and of the cross-entropy.
    """

    def __init__(
        self,
        teacher: Teacher,
        mask_N: Tensor | None,
        labels_N: Tensor | None,
        weights_2: Tensor,
        options: Options,
        tokens: int,
    ) -> None:
        self.teacher, self.weights_2, self.options = teacher, weights_2, options
        self.mask_N = None if mask_N is None else mask_N.contiguous().view(torch.uint8)
        self.labels_N = None if labels_N is None else labels_N.contiguous()
        self.values_2N = torch.zeros((2, tokens), dtype=torch.float32, device=weights_2.device)

    def __call__(self, z_cV: Tensor, y_cV: Tensor | None, chunk: slice, grad: bool) -> None:
        """Fill the chunk's values; with ``grad`` write the loss's gradient over ``z_cV``."""
        if self.teacher.indices_NK is not None:
            self._tails(z_cV, chunk, grad)
            return
        width = z_cV.stride(0)
        if y_cV is None:  # given by the caller, whose rows end at the vocabulary
            assert self.teacher.logits_NV is not None
            y_cV, width = self.teacher.logits_NV[chunk], z_cV.shape[1]
            y_cV = y_cV if y_cV.stride(1) == 1 else y_cV.contiguous()
        options, labels_c = self.options, self._of(self.labels_N, chunk)
        rows, vocab = z_cV.shape
        lanes, warps = block(vocab)
        compare_rows[(rows,)](
            z_cV,
            y_cV,
            self.values_2N[0, chunk],
            self.values_2N[1, chunk],
            labels_c,
            self._of(self.mask_N, chunk),
            self.weights_2,
            z_cV.stride(0),
            y_cV.stride(0),
            z_cV.stride(0),
            width,
            vocab,
            1 / options.temperature,
            options.beta,
            options.student_softcap or 1.0,
            options.teacher_softcap or 1.0,
            KIND=DIVERGENCES.index(options.divergence),
            GRAD=grad,
            CE_GRAD=options.ce_weight != 0,
            LABELS=labels_c is not None,
            MASK=self.mask_N is not None,
            HOT=options.temperature != 1,
            Z_CAPPED=options.student_softcap is not None,
            Y_CAPPED=options.teacher_softcap is not None,
            LANES=lanes,
            num_warps=warps,
        )

    def _tails(self, z_cV: Tensor, chunk: slice, grad: bool) -> None:
        """The same for a top-k: its logits are taken out, and their gradients put in after."""
        assert self.teacher.indices_NK is not None and self.teacher.log_probs_NK is not None
        index_cK = self.teacher.indices_NK[chunk].long().contiguous()
        log_p_cK = self.teacher.log_probs_NK[chunk].contiguous()
        options, labels_c = self.options, self._of(self.labels_N, chunk)
        label_logit_c = None
        if labels_c is not None:
            past_c1 = (labels_c >= z_cV.shape[1])[:, None]
            label_c1 = labels_c.long().clamp(min=0)[:, None].masked_fill(past_c1, 0)
            label_logit_c = z_cV.gather(1, label_c1).masked_fill(past_c1, torch.nan)
        if self.mask_N is not None:  # a token that does not count may have any ids
            spare_K = torch.arange(index_cK.shape[1], device=z_cV.device)
            index_cK = index_cK.where(self.mask_N[chunk, None] != 0, spare_K)
        top_cK = z_cV.gather(1, index_cK)
        z_cV.scatter_(1, index_cK, -torch.inf)
        lanes, warps = block(z_cV.shape[1])
        compare_tails[(len(z_cV),)](
            z_cV,
            top_cK,
            log_p_cK,
            index_cK,
            self.values_2N[0, chunk],
            self.values_2N[1, chunk],
            labels_c,
            label_logit_c,
            self._of(self.mask_N, chunk),
            self.weights_2,
            z_cV.stride(0),
            z_cV.stride(0),
            z_cV.shape[1],
            1 / options.temperature,
            options.student_softcap or 1.0,
            K=index_cK.shape[1],
            K_BLOCK=triton.next_power_of_2(index_cK.shape[1]),
            GRAD=grad,
            CE_GRAD=options.ce_weight != 0,
            LABELS=labels_c is not None,
            MASK=self.mask_N is not None,
            HOT=options.temperature != 1,
            CAPPED=options.student_softcap is not None,
            LANES=lanes,
            num_warps=warps,
        )
        if grad:
            z_cV.scatter_(1, index_cK, top_cK)

    def _of(self, tensor_N: Tensor | None, chunk: slice) -> Tensor | None:
        return None if tensor_N is None else tensor_N[chunk]


def scores(
    z_cV: Tensor,
    y_cV: Tensor,
    labels_c: Tensor,
    values_3c: Tensor,
    agree_c: Tensor,
    caps: tuple[float | None, float | None],
) -> None:
    """Fill KL and both -log softmax at the labels [3, c], and whether the argmaxes agree [c]."""
    lanes, warps = block(z_cV.shape[1])
    score_rows[(len(z_cV),)](
        z_cV,
        y_cV,
        *values_3c,
        agree_c.view(torch.uint8),
        labels_c.contiguous(),
        z_cV.stride(0),
        z_cV.stride(0),
        z_cV.shape[1],
        caps[0] or 1.0,
        caps[1] or 1.0,
        Z_CAPPED=caps[0] is not None,
        Y_CAPPED=caps[1] is not None,
        LANES=lanes,
        num_warps=warps,
    )


def block(vocab: int) -> tuple[int, int]:
    """(lanes of a block of columns, warps): 16 columns a thread, so that several rows overlap."""
    return (64, 2) if vocab <= 4096 else (512, 8)
