"""Several linear layers as one weight, without a second copy of it.

The layers go on working: their parameters become views of the rows that are theirs.
R rows of all layers together, C input channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ltconvert.convert.mixers.projection import Linear
from ltconvert.convert.students.blocks import DecoderLayer
from ltconvert.convert.students.dreamer.layer import DreamerLayer
from ltconvert.convert.students.merge import corrected


def join(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """(weight [R, C], bias [R] or None) of linear layers of one input, in their order.

    Layers without a bias among some that have one get zeros. Layers that are joined already stay as
    they are, so that several callers share one weight.

    Raises:
        ValueError: the weights differ in dtype or device.
    """
    made = {(linear.weight.dtype, linear.weight.device) for linear in linears}
    if len(made) > 1:
        raise ValueError(
            "layers to be joined must have one dtype and device, got "
            + ", ".join(sorted(f"{dtype} on {device}" for dtype, device in made))
        )
    sizes = [linear.out_features for linear in linears]
    weight = _join([linear.weight for linear in linears], sizes)
    assert weight is not None
    return weight, _join([linear.bias for linear in linears], sizes)


def split(model: nn.Module) -> None:
    """Undo ``join`` everywhere in a model: every parameter gets memory of its own again."""
    for parameter in model.parameters():
        if parameter.untyped_storage().nbytes() != parameter.nbytes:
            with torch.inference_mode(False):
                parameter.data = parameter.data.clone()


def places(model: nn.Module) -> tuple[Any, ...]:
    """Where all parameters lie: other places mean that what points at them is out of date.

    Of what a Decoder holds copies of, a loop each, also how often it was changed: of linear layers
    that loops share, and of whole layers with corrections.
    Of Dreamers also how routing is set and how far it is released: a graph holds what counts then.
    """
    copied = (
        module
        for module in model.modules()
        if (isinstance(module, Linear) and module.loops > 1)
        or (isinstance(module, DecoderLayer) and corrected(module))
    )
    merged = {id(p) for module in copied for p in module.parameters() if not p.is_inference()}
    routing = [(m.released(), m.config) for m in model.modules() if isinstance(m, DreamerLayer)]
    return *routing, *(
        (p.data_ptr(), p.dtype, p._version if id(p) in merged else 0) for p in model.parameters()
    )


def _join(parts: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return None
    with torch.inference_mode(False), torch.no_grad():
        if (whole := _joined(parts, sizes, first)) is not None:
            return whole
        whole = first.new_zeros(sum(sizes), *first.shape[1:])
        for part, rows in zip(parts, whole.split(list(sizes)), strict=True):
            if part is not None:
                rows.copy_(part)
                part.data = rows
        return whole.detach()


def _joined(parts: Sequence[Tensor | None], sizes: Sequence[int], first: Tensor) -> Tensor | None:
    """The weight that the parts are rows of already, or None."""
    shape = torch.Size([sum(sizes), *first.shape[1:]])
    if first.untyped_storage().nbytes() != shape.numel() * first.itemsize:
        return None
    strides = torch.empty(shape, device="meta").stride()
    whole = first.detach().as_strided(shape, strides, 0)
    places = zip(parts, whole.split(list(sizes)), strict=True)
    same = (part is None or part.data_ptr() == rows.data_ptr() for part, rows in places)
    return whole if all(same) else None


def linears_of(module: nn.Module, names: Sequence[str]) -> Iterator[nn.Linear]:
    """The linear layers of a module under some of the names, those that it has."""
    for name in names:
        if isinstance(linear := getattr(module, name, None), nn.Linear):
            yield linear
