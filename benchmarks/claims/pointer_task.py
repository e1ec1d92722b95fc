"""Pointers that hold values, swapped one pair after the other, then asked for: state and recall.

    START  p v p v ...  SWAP p q p  SWAP p q p ...  ASK  p p ...

All n pointers get a value each, in any order; a swap exchanges what two pointers hold; half of the
pointers are then asked for, and the value each holds in the end is what a model has to say. It is
never told a value after the first ones, nor whether it was right. A swap names its first pointer
again after the second, so that each is named at a place which knows of the other.

Followed backwards, each of n swaps concerns the pointer that is asked for with probability 2 / n:
an answer hangs on two swaps on average, whatever n, and 90 % right takes chains of 3 among 4
pointers, of 4 among more. What grows with n is what has to be told apart, and how far back it lies.

As many swaps as pointers are not learnt from nothing: the questions alone say nothing of the swaps
between. A ladder therefore begins without swaps and adds one at a time, then pointers.

B rows, T tokens, N pointers, A asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ltconvert.distill.data import Batch
from ltconvert.distill.data.batch import IGNORED
from ltconvert.errors import UserError

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
        return 1 + 2 * self.pointers + 4 * self.swaps + 1 + self.asked

    def draw(self, rows: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """``(ids, labels)``, [B, T] each, with a label at each pointer that is asked for."""
        at_B = np.arange(rows)
        names_BN = FIRST_NAME + _choose(random, rows, self.names, self.pointers)
        held_BN = FIRST_NAME + self.names + _choose(random, rows, self.names, self.pointers)
        pairs_BT = np.stack([names_BN, held_BN], 2).reshape(rows, -1)
        parts = [np.full((rows, 1), START), pairs_BT]
        for _ in range(self.swaps):
            one_B = random.integers(self.pointers, size=rows)
            other_B = (one_B + random.integers(1, self.pointers, size=rows)) % self.pointers
            p_B, q_B = names_BN[at_B, one_B], names_BN[at_B, other_B]
            parts.append(np.stack([np.full(rows, SWAP), p_B, q_B, p_B], 1))
            held_BN[at_B, one_B], held_BN[at_B, other_B] = (
                held_BN[at_B, other_B],
                held_BN[at_B, one_B],
            )
        asked_BA = _choose(random, rows, self.pointers, self.asked)
        parts += [np.full((rows, 1), ASK), names_BN[at_B[:, None], asked_BA]]
        ids_BT = np.concatenate(parts, 1)
        labels_BT = np.full_like(ids_BT, IGNORED)
        labels_BT[:, -self.asked :] = held_BN[at_B[:, None], asked_BA]
        return ids_BT, labels_BT


def ladder(names: int, smallest: int, largest: int) -> list[PointerTask]:
    """What is learnt, in this order: swaps come one by one, then n grows by a half or a third.

    The first n with 0, 1, ... n swaps, then n swaps among n pointers: 4, 6, 8, 12, 16, 24, ...

    Raises:
        UserError: the first n is below 2 or above the last one.
    """
    if not 2 <= smallest <= largest:
        raise UserError(
            f"--smallest {smallest}, --largest {largest}: expected 2 <= smallest <= largest"
        )
    rungs, n = [(smallest, swaps) for swaps in range(smallest + 1)], smallest
    while n < largest:
        rungs += [(n * 3 // 2, n * 3 // 2), (n * 2, n * 2)]
        n *= 2
    return [PointerTask(names, n, swaps) for n, swaps in rungs if n <= largest]


class PointerStream:
    """Endless micro-batches; those of one seed are the same for every model.

    Half of the rows are of the last task, the others of an earlier one, drawn anew every time, so
    that nothing is forgotten; they are filled up at their end, which no model reads before it.

    Args:
        tasks: rungs of a ladder from the first one to that which is to be learnt.
        seed: anything that tells this stream's rows from others; None: the held-out rows.
    """

    def __init__(
        self, tasks: Sequence[PointerTask], rows: int, seed: tuple[int, ...] | None
    ) -> None:
        self._tasks, self._rows, self._given = tasks, rows, 0
        self._seed = (_HELD_OUT,) if seed is None else (_TRAINING, *seed)

    def __next__(self) -> Batch:
        *earlier, last = self._tasks
        random = np.random.default_rng((*self._seed, last.pointers, last.swaps, self._given))
        self._given += 1
        others = self._rows // 2 if earlier else 0
        ids_BT, labels_BT = last.draw(self._rows - others, random)
        if others:
            more = earlier[random.integers(len(earlier))].draw(others, random)
            fill = (0, 0), (0, last.length - more[0].shape[1])
            ids_BT = np.concatenate([ids_BT, np.pad(more[0], fill, constant_values=START)])
            labels_BT = np.concatenate([labels_BT, np.pad(more[1], fill, constant_values=IGNORED)])
        return _batch(ids_BT, labels_BT)

    def state_dict(self) -> dict[str, Any]:
        """The position: batches given out."""
        return {"batches": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position."""
        self._given = state["batches"]


def _batch(ids_BT: np.ndarray, labels_BT: np.ndarray) -> Batch:
    return Batch(
        input_ids_BT=torch.from_numpy(ids_BT),
        segment_ids_BT=torch.zeros(ids_BT.shape, dtype=torch.int32),
        labels_BT=torch.from_numpy(labels_BT),
        keep_BT=torch.ones(ids_BT.shape, dtype=torch.bool),
        padded=False,
    )


def _choose(random: np.random.Generator, rows: int, among: int, count: int) -> np.ndarray:
    """``count`` different numbers below ``among`` in each row, in any order."""
    return random.random((rows, among)).argsort(1)[:, :count]
