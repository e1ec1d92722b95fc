"""A tied layer as it is in one loop: a plain layer, corrections merged into its matrices."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.convert.mixers.projection import Linear
from ltconvert.convert.students.blocks import DecoderLayer


@torch.no_grad()
def in_loop(layer: DecoderLayer, loop: int) -> DecoderLayer:
    """A plain layer that computes what ``layer`` does in one loop.

    With corrections every tensor is a copy, since merged matrices are no loop's alone and a Decoder
    joins others to them; without, all but what loops have of their own stays the layer's memory.
    """
    kept = {} if corrected(layer) else {id(p): p for p in layer.parameters()}
    plain = copy.deepcopy(layer, kept)
    for part in plain.modules():
        if isinstance(part, Linear) and part.loops > 1:
            _merge(part, loop)
        elif isinstance(part, RMSNorm):
            part.weight = _frozen(part.weight_in(loop))
    return plain


def corrected(layer: nn.Module) -> bool:
    """Whether a layer's matrices differ from loop to loop."""
    return any(isinstance(part, Linear) and part.rank for part in layer.modules())


def _merge(linear: Linear, loop: int) -> None:
    if linear.rank:
        linear.weight = _frozen(linear.weight_in(loop))
        del linear.lora_a, linear.lora_b
    if (bias := linear.bias_in(loop)) is not None:
        linear.bias = _frozen(bias)
    linear.loops, linear.rank = 1, 0


def _frozen(value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value.detach(), requires_grad=False)
