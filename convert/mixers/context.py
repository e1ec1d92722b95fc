"""What every mixer of one forward pass shares: positions, padding, documents, masks.

Shape letters: B rows, T new tokens, S cached and new tokens together, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class SequenceContext:
    """Computed once per forward pass, read by every layer in every loop.

    Attributes:
        rope: (cos, sin), each [B, T, D], by RoPE name.
        keep_BS: False at padding, over cached and new tokens; None when nothing is padding.
        keep_BT: the same over the new tokens alone; None when none of them is padding.
        segment_ids_BT: the document of each new token; None when a row is one document.
    """

    rope: dict[str, tuple[Tensor, Tensor]]
    num_tokens: int
    device: torch.device
    keep_BS: Tensor | None = None
    keep_BT: Tensor | None = None
    segment_ids_BT: Tensor | None = None
    _masks: dict[tuple[int | None, int], Tensor | None] = field(default_factory=dict)

    def attention_mask(self, window: int | None, num_keys: int) -> Tensor | None:
        """Which keys a query may see, boolean [B or 1, 1, T, num_keys].

        The keys are the last ``num_keys`` tokens up to and including the new ones. None means that
        plain causal attention of T new tokens over T keys is meant. Padding queries see themselves
        alone, so that no softmax runs over an empty set.
        """
        key = (window, num_keys)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, num_keys)
        return self._masks[key]

    def _build_mask(self, window: int | None, num_keys: int) -> Tensor | None:
        if window is not None and num_keys <= window:
            window = None
        plain = self.keep_BS is None and self.segment_ids_BT is None
        if plain and window is None and num_keys == self.num_tokens:
            return None
        queries_T = torch.arange(num_keys - self.num_tokens, num_keys, device=self.device)[:, None]
        keys_S = torch.arange(num_keys, device=self.device)[None, :]
        mask = keys_S <= queries_T
        if window is not None:
            mask = mask & (queries_T - keys_S < window)
        mask = mask[None]
        if self.segment_ids_BT is not None:
            ids = self.segment_ids_BT
            mask = mask & (ids[:, :, None] == ids[:, None, :])
        if self.keep_BS is not None:
            mask = (mask & self.keep_BS[:, None, -num_keys:]) | (keys_S == queries_T)
        return mask[:, None]
