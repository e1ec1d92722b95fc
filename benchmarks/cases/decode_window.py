"""A window of attention beside a recurrence, one token, against a copy of the keys and values.

Steps take turns over windows that are larger than a GPU's second-level cache in sum, as the layers
of a model are. B batch, H heads, S slots of the window, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.benchmarks import timing
from ltconvert.benchmarks.case import STEP, Case, Inputs, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.kernels.decode_window import decode_window

# B, H, S, D
SHAPES = {
    "full": ((1, 16, 128, 128), (8, 16, 128, 128), (1, 16, 512, 128)),
    "quick": ((1, 16, 128, 128),),
    "tiny": ((2, 4, 40, 16),),
}
TURN_BYTES = 2**27


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """Full windows."""
    return [_case(*shape, device) for shape in SHAPES[scale]]


def _case(batch: int, heads: int, slots: int, width: int, device: torch.device) -> Case:
    read_bytes = 2 * 2 * batch * heads * slots * width  # keys and values in bf16

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        return {
            "q": draw.normal(batch, heads, width),
            "k": draw.normal(batch, heads, slots, width),
            "v": draw.normal(batch, heads, slots, width),
            "lengths": torch.full((batch,), slots, device=device),
            "other": draw.normal(batch, heads, width),
            "rest": draw.normal(batch, heads),
            "outside": torch.ones(batch, dtype=torch.bool, device=device),
        }

    def floor(inputs: Inputs) -> dict[str, float]:
        return {"graph": timing.copy_ms(read_bytes, device)}

    return Case(
        op="decode_window",
        shape=f"{batch}x{heads}x{slots}x{width}",
        make=make,
        ours=attend,
        phases=STEP if device.type == "cuda" else STEP[:1],
        sets=max(2, min(64, TURN_BYTES // read_bytes)),
        floor=floor,
        floor_name="copy of keys and values",
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, other: Tensor, rest: Tensor, outside: Tensor
) -> Tensor:
    """Output [B, H, D]."""
    return decode_window(q, k, v, lengths, other, rest, outside, scale=q.shape[-1] ** -0.5)
