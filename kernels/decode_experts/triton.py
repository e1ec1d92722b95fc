"""``decode_experts`` in Triton: one launch."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ltconvert.kernels import overlap
from ltconvert.kernels.decode_experts.kernels import experts_kernel
from ltconvert.kernels.decoding import processors

OUTPUTS = (4, 2, 1)  # of a program
PROGRAMS = 3.0  # a multiprocessor, where outputs suffice
BLOCK_BYTES = 2048  # of a row of weights at a time: 16 a thread
WARPS = 4


def decode_experts(
    x: Tensor,
    weight_ERC: Tensor,
    bias_ER: Tensor | None,
    chosen_NK: Tensor,
    weights_NK: Tensor | None,
    *,
    residual_NO: Tensor | None,
    swiglu: bool,
    activation: str,
) -> Tensor:
    """See ``ltconvert.kernels.decode_experts.decode_experts``."""
    experts, outputs, channels = weight_ERC.shape
    outputs = outputs // 2 if swiglu else outputs
    tokens, choices = chosen_NK.shape
    summed = weights_NK is not None
    y = x.new_empty((tokens, outputs) if summed else (tokens, choices, outputs))
    rows = y.shape[:-1].numel()
    if not rows or not outputs:
        return y
    wanted = PROGRAMS * processors(x.device)
    enough = (n for n in OUTPUTS if rows * triton.cdiv(outputs, n) >= wanted)
    each = next(enough, OUTPUTS[-1])
    bias, weights, residual = (
        None if given is None else given.contiguous()
        for given in (bias_ER, weights_NK, residual_NO)
    )
    with torch.cuda.device_of(x):
        # Rows with the same expert run side by side and find its weights in a cache.
        experts_kernel[(rows, triton.cdiv(outputs, each))](
            x.contiguous(), weight_ERC, bias, chosen_NK.contiguous(), weights, residual, y,
            experts, outputs, weight_ERC.stride(0), weight_ERC.stride(1),
            C=channels, K=choices, SHARED=x.dim() == 2, SUM=summed,
            SWIGLU=swiglu, ACTIVATION=activation,
            BO=each, BC=min(triton.next_power_of_2(channels), BLOCK_BYTES // x.element_size()),
            num_warps=WARPS, **overlap.options(x.device),
        )  # fmt: skip
    return y
