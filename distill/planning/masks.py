"""Memory that grows with the square of a row's length: masks of packed rows, soft-capped scores.

There is none where `window_attention` has a kernel, which takes bounds of documents. Elsewhere a
pass makes a mask for each window that its layers have, and PyTorch's attention writes it out in
numbers in each visit, for the backward pass too; scores that a soft cap goes over stand in memory
for every head. Bytes a pair of query and key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltconvert.convert.inspect import LayerFacts
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.kernels import dispatch, limits

_MIXERS = ("full", "window")  # those of `softmax_attention`; others have kernels of their own
_NUMBER = {"fp32": 4, "bf16": 2}
# The inverted mask; of a head tanh, softmax and, rounded, the weights. Tests hold it to autograd.
_CAPPED, _CAPPED_HEAD = 1, {"fp32": 8, "bf16": 10}


def mask_bytes(
    spec: TeacherSpec,
    layers: Sequence[LayerFacts],
    rows: int,
    length: int,
    precision: str,
    device: str,
    *,
    one_visit: bool = False,
) -> int:
    """Of one pass over packed rows, as it stands before the backward pass.

    Args:
        layers: of the model that passes; without any that makes masks those of its teacher count,
            one visit at a time.
        one_visit: what visits keep is made anew for each, or not kept.
    """
    if not makes_masks(spec, precision, device):
        return 0
    made = [layer for layer in layers if layer.mixer in _MIXERS]
    windows = [window for layer in made for window in layer.windows if window != 0]
    kept = max(1, 1 if one_visit else len(windows))
    number = _NUMBER[precision]
    if spec.attention_softcap is not None:
        number = _CAPPED + _CAPPED_HEAD[precision] * spec.num_attention_heads
    return rows * length**2 * (max(1, len(set(windows))) + kept * number)


def makes_masks(spec: TeacherSpec, precision: str, device: str) -> bool:
    """Whether attention over packed rows has no kernel here, see ``softmax_attention``."""
    op = "window_attention"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    head = torch.empty(1, 1, 1, spec.head_dim, dtype=dtype, device="meta")
    backend, _ = dispatch.choose(op, dispatch.asked_for(op), device)
    return backend == "reference" or limits.of_window_attention(head, head, head) is not None
