"""One micro-batch of packed rows. Shape letters: B rows, T tokens a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

IGNORED = -100  # the label that every loss leaves out (PyTorch's own convention)


@dataclass
class Row:
    """One packed row in numpy: ids, labels, segments [T] and how many of its tokens are real."""

    input_ids: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    filled: int


@dataclass
class Batch:
    """Packed rows.

    Attributes:
        input_ids_BT: int64.
        segment_ids_BT: int32, 0, 1, 2, ... along a row: the document that a token belongs to.
            Padding has a segment of its own.
        labels_BT: int64, the next token of the same document; -100 at a document's last token and
            at padding. At a row's last token it is the token that the next row begins with.
        keep_BT: bool, False = padding (only at the end of the last held-out row).
        padded: whether any token is padding; None: not looked at yet.
    """

    input_ids_BT: Tensor
    segment_ids_BT: Tensor
    labels_BT: Tensor
    keep_BT: Tensor
    padded: bool | None = None

    @property
    def mask_BT(self) -> Tensor | None:
        """``keep_BT``, or None where nothing is padding, which saves work all over a model."""
        return None if self.padded is False else self.keep_BT

    @property
    def tokens(self) -> int:
        """Number of tokens that are not padding."""
        return int(self.keep_BT.sum())

    def to(self, device: torch.device | str) -> Batch:
        """The same rows on another device; padding is looked for here, where looking is free."""
        padded = self.padded
        if padded is None and self.keep_BT.device.type == "cpu":
            padded = not bool(self.keep_BT.all())
        return Batch(
            self.input_ids_BT.to(device, non_blocking=True),
            self.segment_ids_BT.to(device, non_blocking=True),
            self.labels_BT.to(device, non_blocking=True),
            self.keep_BT.to(device, non_blocking=True),
            padded,
        )

    def pinned(self) -> Batch:
        """The same rows in memory that a GPU copies from while the process goes on."""
        return replace(
            self,
            input_ids_BT=self.input_ids_BT.pin_memory(),
            segment_ids_BT=self.segment_ids_BT.pin_memory(),
            labels_BT=self.labels_BT.pin_memory(),
            keep_BT=self.keep_BT.pin_memory(),
        )

    @classmethod
    def of_rows(cls, rows: Sequence[Row]) -> Batch:
        """Stack rows of one length."""
        keep = np.stack([np.arange(len(row.input_ids)) < row.filled for row in rows])
        return cls(
            torch.from_numpy(np.stack([row.input_ids for row in rows])),
            torch.from_numpy(np.stack([row.segment_ids for row in rows])),
            torch.from_numpy(np.stack([row.labels for row in rows])),
            torch.from_numpy(keep),
        )
