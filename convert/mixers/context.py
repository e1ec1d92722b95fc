"""What every mixer of one forward pass shares: positions, padding, documents, masks.

Shape letters: B rows, T new tokens, S cached and new tokens together, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ltconvert.kernels import dispatch
from ltconvert.kernels.depth_attention import DepthSlots
from ltconvert.kernels.segments import Bounds, segment_bounds


@dataclass(frozen=True)
class DepthView:
    """What one visit of a layer sees of the depth stream, see ``students/depth_stream.py``.

    Attributes:
        slots: by the name of the positions of their keys; empty where nothing is read.
        count: how many of them are read.
        schedule: scalar s of the merge, on the device.
        writes: the sublayers of this visit that leave a slot.
    """

    slots: Mapping[str | None, DepthSlots]
    count: int
    schedule: Tensor
    writes: tuple[str, ...] = ()


@dataclass
class SequenceContext:
    """Computed once per forward pass, read by every layer in every loop.

    Attributes:
        rope: (cos, sin), each [B, T, D], by RoPE name.
        positions_BT: of the new tokens, [B or 1, T], counted in each document.
        keep_BS: False at padding, over cached and new tokens; None when nothing is padding.
        keep_BT: the same over the new tokens alone; None when none of them is padding.
        segment_ids_BT: the document of each new token; None when a row is one document.
        kept: by mixer, what its last visit took into its cache; None where nobody asks.
        loop: whose tensors a layer uses where loops have some of their own.
        depth: what this visit sees of the depth stream; None where there is none.
    """

    rope: dict[str, tuple[Tensor, Tensor]]
    num_tokens: int
    device: torch.device
    positions_BT: Tensor
    keep_BS: Tensor | None = None
    keep_BT: Tensor | None = None
    segment_ids_BT: Tensor | None = None
    loop: int = 0
    learns_choice: bool = False  # mixers that choose keys give the loss that teaches them
    kept: dict[nn.Module, Sequence[Tensor]] | None = None
    depth: DepthView | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict)

    def at(self, loop: int) -> SequenceContext:
        """The same pass in another loop; masks are made once for all."""
        return self if loop == self.loop else replace(self, loop=loop)

    def keep(self, mixer: nn.Module, taken_in: Sequence[Tensor]) -> None:
        """Note what ``mixer.take_in`` can put into the cache of another visit."""
        if self.kept is not None:
            self.kept[mixer] = taken_in

    def prepare(self, windows: Iterable[int | None]) -> None:
        """Make what layers of a pass without a cache share, before compiled ones read it."""
        self.bounds()
        if not self.has_kernel:
            for window in windows:
                self.attention_mask(window, self.num_tokens)

    def is_plain(self, window: int | None) -> bool:
        """Whether the order of tokens alone limits what new ones see of each other."""
        unlimited = window is None or window >= self.num_tokens
        return unlimited and self.keep_BS is None and self.segment_ids_BT is None

    @property
    def has_kernel(self) -> bool:
        """Whether ``window_attention`` has a kernel here, which needs no mask in memory."""
        asked = dispatch.asked_for("window_attention")
        return dispatch.choose("window_attention", asked, self.device)[0] != "reference"

    def bounds(self) -> Bounds | None:
        """Where the document of each new token lies; None when a row is one document."""
        return self.remembered("bounds", lambda: segment_bounds(self.segment_ids_BT))

    def attention_mask(self, window: int | None, num_keys: int) -> Tensor | None:
        """Which keys a query may see, boolean [B or 1, 1, T, num_keys].

        The keys are the last ``num_keys`` tokens up to and including the new ones. None means that
        plain causal attention of T new tokens over T keys is meant. Padding queries see themselves
        alone, so that no softmax runs over an empty set.
        """
        return self.remembered(
            ("mask", window, num_keys), lambda: self._build_mask(window, num_keys)
        )

    def starts(self, num_keys: int) -> Tensor:
        """The column where each query's document or row begins, [B or 1, T], of ``num_keys``.

        Padding at the left of a row is before its beginning.
        """
        return self.remembered(("starts", num_keys), lambda: self._build_starts(num_keys))

    def first_seen(self, window: int | None, num_keys: int) -> Tensor:
        """The first column that each query sees, [B or 1, T]: of its document, of its window."""
        starts_BT = self.starts(num_keys)
        if window is None:
            return starts_BT
        return starts_BT.maximum(self._columns(num_keys) - window + 1)

    def remembered(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, made once a pass; anew where layers are compiled."""
        if key in self._made:
            return self._made[key]
        made = make()
        if not torch.compiler.is_compiling():  # compiled once for each state it finds
            self._made[key] = made
        return made

    def _columns(self, num_keys: int) -> Tensor:
        """Columns of the new tokens, [1, T]."""
        return torch.arange(num_keys - self.num_tokens, num_keys, device=self.device)[None]

    def _build_starts(self, num_keys: int) -> Tensor:
        columns_BT = self._columns(num_keys)
        starts_BT = torch.zeros_like(columns_BT)
        if (ids_BT := self.segment_ids_BT) is not None:
            begins_BT = F.pad(ids_BT[:, 1:] != ids_BT[:, :-1], (1, 0))
            starts_BT = columns_BT.where(begins_BT, 0).cummax(dim=-1).values
        if self.keep_BS is not None:
            empty_B1 = self.keep_BS[:, -num_keys:].int().argmax(dim=-1, keepdim=True)
            starts_BT = starts_BT.maximum(empty_B1).minimum(columns_BT)
        return starts_BT

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
