"""Pointers that hold values, swapped one pair after the other, then asked for: state and recall.

    START  p v p v ...  SWAP p q  SWAP p q ...  ASK  p v  p v ...

All n pointers get a value each, in any order; a swap exchanges what two pointers hold; half of the
pointers are then asked for, and the value each holds in the end is what a model has to say. No
value occurs twice, and what is not asked for leaves too much open to be guessed from what is.

B rows, T tokens, N pointers, A asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ltconvert.distill.data import Batch
from ltconvert.distill.data.batch import IGNORED

START, SWAP, ASK = 0, 1, 2
FIRST_NAME = 3
_TRAINING, _HELD_OUT = 0, 1  # the first word of a random seed


@dataclass(frozen=True)
class PointerTask:
    """Sizes of a row.

    Attributes:
        names: names there are for pointers, and values there are; a row draws its own from them.
        pointers: pointers in a row, N; at least 2.
        swaps: swaps in a row.
    """

    names: int
    pointers: int
    swaps: int

    @property
    def vocab(self) -> int:
        """Tokens there are: three marks, names of pointers, values."""
        return FIRST_NAME + 2 * self.names

    @property
    def asked(self) -> int:
        """Pointers asked for in a row, A."""
        return self.pointers // 2

    @property
    def length(self) -> int:
        """Tokens of a row, T."""
        return 1 + 2 * self.pointers + 3 * self.swaps + 1 + 2 * self.asked

    def batch(self, rows: int, random: np.random.Generator) -> Batch:
        """Rows with a label at each pointer that is asked for."""
        at_B = np.arange(rows)
        names_BN = FIRST_NAME + _choose(random, rows, self.names, self.pointers)
        held_BN = FIRST_NAME + self.names + _choose(random, rows, self.names, self.pointers)
        parts = [np.full((rows, 1), START), _pairs(names_BN, held_BN)]
        for _ in range(self.swaps):
            one_B = random.integers(self.pointers, size=rows)
            other_B = (one_B + random.integers(1, self.pointers, size=rows)) % self.pointers
            parts.append(
                np.stack([np.full(rows, SWAP), names_BN[at_B, one_B], names_BN[at_B, other_B]], 1)
            )
            held_BN[at_B, one_B], held_BN[at_B, other_B] = (
                held_BN[at_B, other_B],
                held_BN[at_B, one_B],
            )
        asked_BA = _choose(random, rows, self.pointers, self.asked)
        pick_B1 = at_B[:, None]
        answers_BA = held_BN[pick_B1, asked_BA]
        parts += [np.full((rows, 1), ASK), _pairs(names_BN[pick_B1, asked_BA], answers_BA)]
        ids_BT = np.concatenate(parts, 1)
        labels_BT = np.full_like(ids_BT, IGNORED)
        labels_BT[:, -2 * self.asked :: 2] = answers_BA
        return Batch(
            input_ids_BT=torch.from_numpy(ids_BT),
            segment_ids_BT=torch.zeros(ids_BT.shape, dtype=torch.int32),
            labels_BT=torch.from_numpy(labels_BT),
            keep_BT=torch.ones(ids_BT.shape, dtype=torch.bool),
            padded=False,
        )


class PointerStream:
    """Endless micro-batches of a task; rows of one seed are the same for every model.

    Args:
        seed: anything that tells this stream's rows from others; None: the held-out rows.
    """

    def __init__(self, task: PointerTask, rows: int, seed: tuple[int, ...] | None) -> None:
        self._task, self._rows, self._given = task, rows, 0
        self._seed = (_HELD_OUT,) if seed is None else (_TRAINING, *seed)

    def __next__(self) -> Batch:
        random = np.random.default_rng((*self._seed, self._task.pointers, self._given))
        self._given += 1
        return self._task.batch(self._rows, random)

    def state_dict(self) -> dict[str, Any]:
        """The position: batches given out."""
        return {"batches": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""
        self._given = state["batches"]


def _choose(random: np.random.Generator, rows: int, among: int, count: int) -> np.ndarray:
    """``count`` different numbers below ``among`` in each row, in any order."""
    return random.random((rows, among)).argsort(1)[:, :count]


def _pairs(first_BN: np.ndarray, second_BN: np.ndarray) -> np.ndarray:
    """Alternating, [B, 2 N]."""
    return np.stack([first_BN, second_BN], 2).reshape(len(first_BN), -1)
