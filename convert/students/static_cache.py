"""A cache that is allocated once, for a number of rows and tokens known beforehand.

It is filled as ``LoopCache`` is: columns in the order of the input, padding at the left included,
so that mixers, masks and transformers' ``generate()`` need not know of it. ``settle`` then drops
the padding: every row's keys begin at slot 0, and ``lengths_B`` on the device counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from ltconvert.convert.students.cache import LoopCache
from ltconvert.convert.students.lt2_config import LT2Config
from ltconvert.convert.students.shared_cache import owners, share
from ltconvert.convert.students.static_layers import StaticKeys, static_layer, tensors_of


class StaticCache(LoopCache):
    """A LoopCache that never allocates after it was made.

    Attributes:
        lengths_B: real tokens of each row, int32; counted from ``settle`` on.
        settled: padding is gone; only a one-token step may follow, not a forward pass.

    Args:
        config: of the model that fills it.
        batch, max_length: rows, and tokens of the longest one.
        dtype: of keys, values and convolution histories; recurrent states are fp32 at least.
        loop_cache: ``last`` lets full layers keep the keys of their last loop alone; a prompt then
            has to be read in one pass, see ``shared_cache``.
    """

    def __init__(
        self,
        config: LT2Config,
        batch: int,
        max_length: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        loop_cache: str | None = None,
    ) -> None:
        owner_of = owners(config, loop_cache)
        windows = [config.window(step.layer, step.loop) for step in config.schedule()]
        made: dict[str, Any] = {"dtype": dtype, "device": torch.device(device)}
        with torch.inference_mode(False):  # such tensors could not be changed outside of it
            layers: list[Any] = [None] * len(owner_of)
            for slot, kind in enumerate(config.layer_types):
                if not config.attends(slot):  # stays empty
                    layers[slot] = static_layer(config, "full_attention", None, batch, 1, made)
                elif owner_of[slot] == slot:
                    window = windows[slot]
                    layers[slot] = static_layer(config, kind, window, batch, max_length, made)
            self.lengths_B = torch.zeros(batch, dtype=torch.int32, device=device)
        Cache.__init__(self, layers=share(layers, owner_of))
        self.batch, self.max_length = batch, max_length
        self.num_tokens, self.settled = 0, False
        self.steps = self.loops = 0

    @classmethod
    def for_model(
        cls, model: Any, batch: int, max_length: int, loop_cache: str | None = None
    ) -> StaticCache:
        """A cache in the dtype and on the device of an LT2ForCausalLM."""
        made: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
        return cls(model.config, batch, max_length, loop_cache=loop_cache, **made)

    def settle(self, padding: Sequence[int]) -> None:
        """Drop the padding at the left of each row and start to count on the device."""
        for layer in self.layers:
            if isinstance(layer, StaticKeys):
                layer.settle(padding)
        self.lengths_B.copy_(torch.tensor([self.num_tokens - empty for empty in padding]))
        self.settled = True

    def reset(self) -> None:
        """Forget everything, keep the memory."""
        super().reset()
        self.lengths_B.zero_()
        self.settled = False

    @property
    def nbytes(self) -> int:
        """Bytes of everything that the layers hold."""
        return sum(tensor.nbytes for layer in self.layers for tensor in tensors_of(layer))
