"""Recall examples for any tokenizer, exact to the token: the same seed gives the same examples.

Shape letters: B examples, T tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ltconvert.distill.evaluation.recall_text import FILLER, KEYS, QUESTION, STATEMENT
from ltconvert.errors import UserError

Kind = Literal["needle", "multikey"]
KINDS: tuple[Kind, ...] = ("needle", "multikey")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NUM_KEYS = {"needle": 1, "multikey": 4}


@dataclass(frozen=True)
class RecallExamples:
    """Rows of equal length that end with the answer.

    Attributes:
        input_ids_BT: int64, prompt and answer, no padding.
        answer_start_B: index of the first answer token; the row ends with the last one.
        depth_B: where the asked statement lies, 0 at the start of the filler and 1 at its end.
        kind: ``needle`` (one statement) or ``multikey`` (four, one is asked for).
    """

    input_ids_BT: Tensor
    answer_start_B: Tensor
    depth_B: Tensor
    kind: Kind

    def to(self, device: torch.device | str) -> RecallExamples:
        """The same examples on another device."""
        return RecallExamples(
            self.input_ids_BT.to(device), self.answer_start_B.to(device), self.depth_B, self.kind
        )

    def rows(self, first: int, end: int) -> RecallExamples:
        """Examples ``first`` up to, not including, ``end``."""
        part = slice(first, end)
        return RecallExamples(
            self.input_ids_BT[part], self.answer_start_B[part], self.depth_B[part], self.kind
        )

    def __len__(self) -> int:
        return len(self.input_ids_BT)


def retrieval_examples(
    tokenizer: Any,
    length: int,
    count: int,
    seed: int = 0,
    kind: Kind = "needle",
    depths: Sequence[float] = DEPTHS,
) -> RecallExamples:
    """``count`` examples of exactly ``length`` tokens, the depths in turn.

    Raises:
        UserError: ``length`` has no room for statements and question; ``kind`` is unknown.
    """
    if kind not in NUM_KEYS:
        raise UserError(f"unknown kind of recall {kind!r}; choose one of {', '.join(KINDS)}")
    pieces = _Pieces(tokenizer)
    rows, starts, places = [], [], []
    for number in range(count):
        # A string seed hashes alike in every process and keeps lengths and kinds independent.
        rng = random.Random(f"{seed}/{kind}/{length}/{number}")
        depth = depths[number % len(depths)]
        ids, start = _example(pieces, length, depth, NUM_KEYS[kind], rng)
        rows.append(ids)
        starts.append(start)
        places.append(depth)
    return RecallExamples(
        torch.tensor(rows, dtype=torch.int64).reshape(count, length),
        torch.tensor(starts, dtype=torch.int64),
        torch.tensor(places, dtype=torch.float64),
        kind,
    )


class _Pieces:
    """Encodes pieces of text that follow other text, each to the same ids wherever it stands."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._anchor = self._encode(".")
        self.prefix = self._special_prefix()
        self.filler = [self(" " + sentence) for sentence in FILLER]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _special_prefix(self) -> list[int]:
        """What the tokenizer puts before a text of its own accord, such as BOS."""
        plain, special = self._encode("."), list(self._tokenizer(".")["input_ids"])
        for at in range(len(special) - len(plain) + 1):
            if special[at : at + len(plain)] == plain:
                return special[:at]
        return []

    def __call__(self, text: str) -> list[int]:
        """Ids of a text behind a full stop (at its start some tokenizers add a space)."""
        joined = self._encode("." + text)
        if joined[: len(self._anchor)] == self._anchor:
            return joined[len(self._anchor) :]
        return self._encode(text)


def _example(
    pieces: _Pieces, length: int, depth: float, keys: int, rng: random.Random
) -> tuple[list[int], int]:
    """``(ids, start of the answer)`` of one example."""
    names = rng.sample(KEYS, keys)
    values = [str(value) for value in rng.sample(range(1000, 10000), keys)]
    statements = [
        pieces(" " + STATEMENT.format(key=key, value=value))
        for key, value in zip(names, values, strict=True)
    ]
    answer = pieces(" " + values[0])
    question = pieces(" " + QUESTION.format(key=names[0]))
    fixed = len(pieces.prefix) + sum(map(len, statements)) + len(question) + len(answer)
    if fixed > length:
        raise UserError(
            f"recall at {length} tokens is too short: statements and question alone take {fixed} "
            "with this tokenizer; raise eval.recall_lengths_tokens"
        )
    sentences = _filler(pieces, length - fixed, rng)
    # The depth of the asked statement is given, the others lie anywhere.
    spots = [round(depth * len(sentences))] + [rng.randint(0, len(sentences)) for _ in names[1:]]
    ids = list(pieces.prefix)
    for index in range(len(sentences) + 1):
        for spot, statement in zip(spots, statements, strict=True):
            if spot == index:
                ids += statement
        if index < len(sentences):
            ids += sentences[index]
    ids += question
    return ids + answer, len(ids)


def _filler(pieces: _Pieces, tokens: int, rng: random.Random) -> list[list[int]]:
    """Sentences of exactly so many tokens together; the first one may lack its beginning."""
    sentences: list[list[int]] = []
    while tokens > 0:
        order = list(pieces.filler)
        rng.shuffle(order)
        for sentence in order:
            part = sentence[-tokens:]
            sentences.append(part)
            tokens -= len(part)
            if tokens == 0:
                break
    return sentences[::-1]
