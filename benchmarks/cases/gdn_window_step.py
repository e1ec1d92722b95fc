"""One token of a Gated DeltaNet beside a window, against a copy of state, keys and values.

Steps take turns over sets of inputs that are larger than a GPU's second-level cache in sum, as the
layers of a model are. B batch, H heads, S slots of the window, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ltconvert.benchmarks import timing
from ltconvert.benchmarks.case import STEP, Case, Inputs, Scale
from ltconvert.benchmarks.cases.draw import Draw
from ltconvert.kernels.gdn_window_step import Ring, gdn_window_step

# B, H, S, D
SHAPES = {
    "full": ((1, 16, 128, 128), (8, 16, 128, 128), (1, 16, 512, 128)),
    "quick": ((1, 16, 128, 128),),
    "tiny": ((2, 4, 40, 16),),
}
TAPS, EPS = 4, 1e-5
TURN_BYTES = 2**27


def cases(scale: Scale, device: torch.device) -> list[Case]:
    """Full windows."""
    return [_case(*shape, device) for shape in SHAPES[scale]]


def _case(batch: int, heads: int, slots: int, width: int, device: torch.device) -> Case:
    # The state in fp32, read and written; keys and values in bf16, read.
    moved_bytes = batch * heads * width * (2 * 4 * width + 2 * 2 * slots)

    def make(seed: int) -> Inputs:
        draw = Draw(device, seed)
        channels, fp32 = 3 * heads * width, torch.float32
        return {
            "qkv": draw.normal(batch, channels),
            "beta": draw.normal(batch, heads),
            "decay": draw.normal(batch, heads),
            "rest": draw.normal(batch, heads),
            "rates": draw.normal(2, heads, dtype=fp32),
            "state": draw.normal(batch, heads, width, width, dtype=fp32),
            "history": draw.normal(batch, channels, TAPS - 1),
            "conv_weight": draw.normal(channels, TAPS, scale=TAPS**-0.5),
            "gate": draw.normal(batch, heads, width),
            "norm_weight": draw.normal(heads, width, dtype=fp32),
            "k": draw.normal(batch, heads, slots, width),
            "v": draw.normal(batch, heads, slots, width),
            "lengths": torch.full((batch,), slots, device=device),
            "slots": torch.full((batch,), slots // 3, device=device),
            "outside": torch.ones(batch, dtype=torch.bool, device=device),
            "arrivals": torch.zeros(batch, heads, dtype=torch.int32, device=device),
            # Cosines and sines, as far as time is concerned.
            "turn": draw.normal(2, batch, width, dtype=fp32),
        }

    def floor(inputs: Inputs) -> dict[str, float]:
        return {"graph": timing.copy_ms(moved_bytes, device)}

    return Case(
        op="gdn_window_step",
        shape=f"{batch}x{heads}x{slots}x{width}",
        make=make,
        ours=step,
        phases=STEP if device.type == "cuda" else STEP[:1],
        sets=max(2, min(64, TURN_BYTES // moved_bytes)),
        floor=floor,
        floor_name="copy of state, keys and values",
    )


def step(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    rest: Tensor,
    rates: Tensor,
    state: Tensor,
    history: Tensor,
    conv_weight: Tensor,
    gate: Tensor,
    norm_weight: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    slots: Tensor,
    outside: Tensor,
    arrivals: Tensor,
    turn: Tensor,
) -> tuple[Tensor, ...]:
    """Output [B, H, D], and what changes in place."""
    cos_BD, sin_BD = turn.unbind(0)
    ring = Ring(
        k, v, slots, lengths, outside, rest, scale=k.shape[-1] ** -0.5, cos_BD=cos_BD,
        sin_BD=sin_BD, arrivals_BH=arrivals,
    )  # fmt: skip
    y = gdn_window_step(
        ring, qkv, beta, decay, *rates.unbind(0), state, norm_weight, gate,
        eps=EPS, conv_weight_CW=conv_weight, conv_history_BCP=history,
    )  # fmt: skip
    return y, state, history, k, v
