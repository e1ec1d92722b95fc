"""Packed rows: documents one after the other, cut at the row's end, never mixed up.

A document that does not fit goes on in the next row as a new segment (no state crosses rows).
Nothing is dropped and nothing but the last held-out row is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ltconvert.distill.data.batch import IGNORED, Batch, Row
from ltconvert.distill.data.documents import Split
from ltconvert.distill.data.sources import (
    BLOCK_DOCUMENTS,
    empty_split,
    one_epoch,
    open_source,
)
from ltconvert.distill.data.tokens import Encoder
from ltconvert.distill.processes import rank_and_world
from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings


class RowBuilder:
    """Fills one row of `length` tokens from documents or rests of documents."""

    def __init__(self, length: int, padding_id: int) -> None:
        self._input_ids = np.full(length, padding_id, np.int64)
        self._labels = np.full(length, IGNORED, np.int64)
        self._segment_ids = np.zeros(length, np.int32)
        self._filled = 0
        self._segments = 0

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return len(self._input_ids) - self._filled

    def add(self, ids: np.ndarray) -> int:
        """Put the beginning of `ids` [n] into the row as one segment; how many tokens fitted."""
        taken = min(self.room, len(ids))
        start, stop = self._filled, self._filled + taken
        self._input_ids[start:stop] = ids[:taken]
        following = ids[1 : taken + 1]  # one shorter at the document's end: its label stays -100
        self._labels[start : start + len(following)] = following
        self._segment_ids[start:stop] = self._segments
        self._filled, self._segments = stop, self._segments + 1
        return taken

    def finish(self) -> Row:
        """The row; what is left of it is padding in a segment of its own."""
        self._segment_ids[self._filled :] = self._segments
        return Row(self._input_ids, self._labels, self._segment_ids, self._filled)


class PackedStream:
    """Endless micro-batches of one split, epoch after epoch.

    All ranks walk through the same rows and each keeps its share, `rows` of every `rows * world`.
    So the saved position is one and the same for all ranks, and stays right when their number
    changes; the price is that every rank tokenises everything.

    Args:
        rows: rows a batch of this rank.
        seed: order of the documents, together with `settings.shuffle_seed`.
        rank, world: which process of how many; default: what the launcher says.

    Raises:
        UserError: no such source, or an epoch of it is shorter than one row.
    """

    def __init__(
        self,
        settings: DataSettings,
        tokenizer: Any,
        *,
        split: Split,
        seq_len_tokens: int,
        rows: int,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._source = open_source(settings, (settings.shuffle_seed, seed))
        self._encoder = Encoder(tokenizer)
        self._split: Split = split
        self.seq_len_tokens = seq_len_tokens
        here = rank_and_world()
        self.rows = rows
        self.rank = here[0] if rank is None else rank
        self.world = here[1] if world is None else world
        self._epoch_tokens: int | None = 0  # None: the epoch was entered in its middle
        self._enter(self._source.start())

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        all_rows = [self._next_row() for _ in range(self.rows * self.world)]
        mine = all_rows[self.rank * self.rows : (self.rank + 1) * self.rows]
        return Batch.of_rows(mine)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch, exact, small and JSON-able."""
        return {
            "source": self._source.fingerprint,
            "seeds": [self._settings.shuffle_seed, self._seed],
            "cursor": self._cursor,
            "document": self._document,
            "token": self._token,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position.

        Raises:
            UserError: it belongs to other data.
        """
        if state["source"] != self._source.fingerprint:
            raise UserError(
                f"data.source {self._source.name!r} has changed since the checkpoint was written; "
                "put the old data back, or start the stage again in a new --out folder"
            )
        self._epoch_tokens = None
        self._enter(state["cursor"])
        self._document, self._token = state["document"], state["token"]

    def _enter(self, cursor: dict[str, Any]) -> None:
        """Read and tokenise the block at `cursor`; stand at its first token."""
        self._cursor = cursor
        block, self._next_cursor = self._source.read(cursor, BLOCK_DOCUMENTS)
        wanted = [document for document in block if document.in_split(self._split)]
        self._block = self._encoder.encode(wanted)
        self._document = self._token = 0

    def _next_row(self) -> Row:
        row = RowBuilder(self.seq_len_tokens, self._encoder.separator)
        while row.room:
            while self._document >= len(self._block):
                self._next_block()
            ids = self._block[self._document]
            taken = row.add(ids[self._token :])
            self._token += taken
            if self._epoch_tokens is not None:
                self._epoch_tokens += taken
            if self._token == len(ids):
                self._document, self._token = self._document + 1, 0
        return row.finish()

    def _next_block(self) -> None:
        if self._next_cursor["epoch"] != self._cursor["epoch"]:
            self._check_epoch()
            self._epoch_tokens = 0
        self._enter(self._next_cursor)

    def _check_epoch(self) -> None:
        """A row longer than the corpus would hold documents twice."""
        tokens = self._epoch_tokens
        if tokens == 0:
            raise empty_split(self._source, self._split, self._settings.heldout_share)
        if tokens is not None and tokens < self.seq_len_tokens:
            raise UserError(
                f"data.source {self._source.name!r} has {tokens} tokens in its {self._split} "
                f"split, fewer than one row of seq_len_tokens {self.seq_len_tokens}; "
                "lower seq_len_tokens or give more text"
            )


def heldout_batches(
    settings: DataSettings, tokenizer: Any, tokens: int, seq_len_tokens: int, rows: int
) -> list[Batch]:
    """The first `tokens` tokens of the held-out split as fixed batches of at most `rows` rows.

    In the source's own order, so the same for every seed. When the split is smaller, all of it;
    the last row is then padded at its end.

    Raises:
        UserError: the held-out split is empty.
    """
    source = open_source(settings)
    encoder = Encoder(tokenizer)
    wanted = max(1, tokens // seq_len_tokens)
    packed: list[Row] = []
    row = RowBuilder(seq_len_tokens, encoder.separator)
    for document in one_epoch(source, "heldout"):
        ids = encoder.encode([document])[0]
        while len(ids) and len(packed) < wanted:
            ids = ids[row.add(ids) :]
            if not row.room:
                packed.append(row.finish())
                row = RowBuilder(seq_len_tokens, encoder.separator)
        if len(packed) == wanted:
            break
    if len(packed) < wanted and row.room < seq_len_tokens:
        packed.append(row.finish())
    if not packed:
        raise empty_split(source, "heldout", settings.heldout_share)
    return [Batch.of_rows(packed[i : i + rows]) for i in range(0, len(packed), rows)]
