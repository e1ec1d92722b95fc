"""Packed documents and padding, as every sequence op of this package reads them.

B batch, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Bounds(NamedTuple):
    """The first and the last token of each token's segment, int32 [B, T]; they never fall."""

    first_BT: Tensor
    last_BT: Tensor


def segment_counts(segment_ids_BT: Tensor | None, keep_BT: Tensor | None) -> Tensor | None:
    """Segment starts up to and including each token, int64 [B, T].

    None without ids, and on the CPU also where nothing starts (see `can_look`).

    Token t starts a segment when its id differs from that of the last kept token before it.
    Padding (`keep_BT` False) is looked through: it starts nothing and belongs to the segment
    around it, whatever its own id says. The first kept token of a row starts nothing: it continues
    what came before the row. Two tokens of a row are in one segment iff their counts are equal,
    and a token belongs to the segment that reached into the row iff its count is 0.
    """
    if segment_ids_BT is None:
        return None
    if keep_BT is None:
        starts_BT = torch.zeros_like(segment_ids_BT, dtype=torch.bool)
        starts_BT[:, 1:] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    else:
        position_BT = torch.arange(keep_BT.shape[1], device=keep_BT.device).expand_as(keep_BT)
        last_kept_BT = position_BT.masked_fill(~keep_BT, -1).cummax(dim=1).values
        before_BT = torch.nn.functional.pad(last_kept_BT[:, :-1], (1, 0), value=-1)
        id_before_BT = segment_ids_BT.gather(1, before_BT.clamp(min=0))
        starts_BT = keep_BT & (before_BT >= 0) & (segment_ids_BT != id_before_BT)
    if can_look(starts_BT) and not starts_BT.any():
        return None
    return starts_BT.cumsum(dim=1)


def segment_bounds(segment_ids_BT: Tensor | None) -> Bounds | None:
    """Where each token's segment lies; nothing waits for it. None as in `segment_counts`.

    Ids are never the same again once they have changed.
    """
    counts_BT = segment_counts(segment_ids_BT, None)
    if counts_BT is None:
        return None
    first_BT = torch.searchsorted(counts_BT, counts_BT, out_int32=True)
    after_BT = torch.searchsorted(counts_BT, counts_BT, out_int32=True, right=True)
    return Bounds(first_BT, after_BT - 1)


def check_token_grid(name: str, tensor: Tensor | None, batch: int, length: int) -> None:
    """Raise ValueError unless `tensor` is None or [batch, length]."""
    if tensor is not None and tuple(tensor.shape) != (batch, length):
        raise ValueError(
            f"{name} must be [batch, tokens] = [{batch}, {length}], got {list(tensor.shape)}"
        )


def padding_mask(keep_BT: Tensor | None) -> Tensor | None:
    """`keep_BT` as bool; None where it is known without waiting that nothing is padding."""
    if keep_BT is None:
        return None
    keep_BT = keep_BT.bool()
    return None if can_look(keep_BT) and keep_BT.all() else keep_BT


def clear_padding(keep_BT: Tensor | None, *tensors: Tensor | None) -> list[Tensor | None]:
    """Each [B, T, ...] with zeros at padding, whatever stands there; None stays None."""
    if keep_BT is None:
        return list(tensors)
    return [
        None if x is None else x.where(keep_BT.view(*keep_BT.shape, *[1] * (x.dim() - 2)), 0)
        for x in tensors
    ]


def can_look(tensor: Tensor) -> bool:
    """Whether branching on values costs nothing: a GPU would have to wait, a graph would break.

    Tracers have classes of their own for tensors without values.
    """
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and tensor.device.type == "cpu" and not torch.compiler.is_compiling()
