"""Choosing the next token on the device, without the host waiting for it.

B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; what transformers' ``generate()`` does under these names.

    Attributes:
        temperature: 0 takes the likeliest token, and ``top_k`` and ``top_p`` are not looked at.
        top_k: so many likeliest tokens stay; 0 for all.
        top_p: the likeliest tokens that together reach this probability stay; 1 for all.
        repetition_penalty: logits of tokens seen before, prompt included, are divided by it where
            positive and multiplied where negative; 1 for none.

    Raises:
        ValueError: a value outside of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        # Written so that NaN is refused, too.
        if not (self.temperature >= 0 and self.top_k >= 0 and self.repetition_penalty > 0):
            raise ValueError(
                "temperature and top_k must not be negative and repetition_penalty must be above "
                f"0, got {self.temperature}, {self.top_k} and {self.repetition_penalty}"
            )
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must lie in [0, 1], got {self.top_p}")


def choose(
    logits_BV: Tensor,
    sampling: Sampling,
    *,
    seen_BV: Tensor | None = None,
    generator: torch.Generator | None = None,
    out_B: Tensor | None = None,
) -> Tensor:
    """The next token of each row, int64 [B].

    Args:
        seen_BV: True at tokens that the repetition penalty is for; None when there is none.
        generator: of the logits' device; the default one when None.
        out_B: where the tokens go; a new tensor when None.
    """
    if sampling.temperature == 0 and seen_BV is None:
        return torch.argmax(logits_BV, -1, out=out_B)
    logits_BV = logits_BV.float()
    if seen_BV is not None:
        penalty = sampling.repetition_penalty
        weaker_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = torch.where(seen_BV, weaker_BV, logits_BV)
    if sampling.temperature == 0:
        return torch.argmax(logits_BV, -1, out=out_B)
    probabilities_BV = _filtered(logits_BV / sampling.temperature, sampling).softmax(-1)
    # The largest of p / e, e exponential, is token i with probability p_i: no cumulative sums.
    drawn_BV = torch.empty_like(probabilities_BV).exponential_(generator=generator)
    return torch.argmax(probabilities_BV / drawn_BV, -1, out=out_B)


def _filtered(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """-inf in place of what ``top_k`` and then ``top_p`` leave out; the likeliest always stays."""
    vocabulary = logits_BV.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        least_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, float("-inf"))
    if sampling.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(descending=True)
        share_BV = sorted_BV.softmax(-1)
        out_BV = share_BV.cumsum(-1) - share_BV >= sampling.top_p
        out_BV[:, 0] = False
        logits_BV = logits_BV.masked_fill(out_BV.scatter(1, order_BV, out_BV), float("-inf"))
    return logits_BV
