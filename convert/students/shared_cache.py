"""One cache of keys for all loops of a layer: while decoding, every loop looks at the last one's.

Ouro's paper (arXiv 2510.25741) finds that its models decode nearly as well so: a token still goes
through all loops, with its own keys of each loop beside the last loop's keys of the tokens before
it. Keys and values take 1/T of the memory for T loops. A prompt that is read in one pass comes to
no harm, since nothing lies before it.

Only full attention shares. Windows and recurrent states do not grow with the context, and a state
is no list of tokens in which one loop's entries could stand for another's; layers that choose their
keys do so by what each loop has learnt to look for: all of these stay each loop's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ltconvert.errors import UserError

if TYPE_CHECKING:
    from ltconvert.convert.students.lt2_config import LT2Config

LOOP_CACHES = ("own", "last")


class EarlierLoop(CacheLayerMixin):
    """A slot that keeps nothing: it shows new tokens behind the old ones of the last loop's slot.

    The last loop comes last, so what its slot holds meanwhile are the tokens before. In a one-token
    step over a static cache the slot's place for the new token is used for every loop's in turn.

    Args:
        last: the slot of the same layer in the last loop.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, last: Any) -> None:
        self.last = last  # not the parent's: it would make attributes of what is only shown here

    def __getattr__(self, name: str) -> Any:
        """Of the last loop: what a step over a static cache reads."""
        if name == "last":
            raise AttributeError(name)
        return getattr(self.last, name)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Old keys and values of the last loop and new ones [B, G, T, D], side by side."""
        length = self.last.get_seq_length()
        if not length:
            return key_states, value_states
        return (
            torch.cat([self.last.keys[:, :, :length], key_states], dim=2),
            torch.cat([self.last.values[:, :, :length], value_states], dim=2),
        )

    def get_seq_length(self) -> int:
        """Of the last loop."""
        return self.last.get_seq_length()

    def get_max_length(self) -> int:
        """Of the last loop."""
        return self.last.get_max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the last loop."""
        return self.last.get_mask_sizes(query_length)

    def _nothing(self, *_: Any, **__: Any) -> None:
        """The last loop's slot sees to it."""

    lazy_initialization = reset = crop = reorder_cache = _nothing
    batch_repeat_interleave = batch_select_indices = offload = prefetch = _nothing


def owners(config: LT2Config, loop_cache: str | None) -> list[int]:
    """The slot whose cache each slot uses: its own, or that of its layer's last with attention.

    Raises:
        UserError: not one of ``LOOP_CACHES``, or nothing could be shared.
    """
    schedule = config.schedule()
    if loop_cache in (None, "own"):
        return list(range(len(schedule)))
    if loop_cache not in LOOP_CACHES:
        raise UserError(f"loop_cache is {loop_cache!r}; choose one of {', '.join(LOOP_CACHES)}")
    last = {step.layer: step.slot for step in schedule if config.attends(step.slot)}
    found = [
        last[step.layer] if kind == "full_attention" and config.attends(step.slot) else step.slot
        for step, kind in zip(schedule, config.layer_types, strict=True)
    ]
    if found == list(range(len(schedule))):
        why = "has one loop" if config.num_loops == 1 else "loops no layer with full attention"
        raise UserError(
            f"loop_cache is 'last', but this model {why}: there are no keys that loops could "
            "share (windows, recurrent states and chosen keys stay each loop's own); leave it out"
        )
    return found


def share(layers: Sequence[Any], owner_of: Sequence[int]) -> list[Any]:
    """The layers of all slots, those that do not own their cache in their owners' place.

    Args:
        layers: one a slot; None where the slot is not its own owner.
    """
    return [
        layer if owner == slot else EarlierLoop(layers[owner])
        for slot, (layer, owner) in enumerate(zip(layers, owner_of, strict=True))
    ]
