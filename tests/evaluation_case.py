"""Packed rows of random documents with padding, for the tests of evaluation."""

from __future__ import annotations

import torch
from helpers import VOCAB

from ltconvert.distill.data import Batch


def make_batch(lengths: list[list[int]], width: int, seed: int) -> Batch:
    """Rows of documents of the given lengths, padded to ``width``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (len(lengths), width), generator=generator)
    segments = torch.zeros(len(lengths), width, dtype=torch.int32)
    labels = torch.full((len(lengths), width), -100)
    keep = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, documents in enumerate(lengths):
        start = 0
        for number, length in enumerate([*documents, width - sum(documents)]):
            segments[row, start : start + length] = number
            if number < len(documents):
                labels[row, start : start + length - 1] = ids[row, start + 1 : start + length]
                keep[row, start : start + length] = True
            start += length
    return Batch(ids, segments, labels, keep)


BATCHES = [make_batch([[9, 11], [20]], 20, 0), make_batch([[5, 3, 6]], 20, 1)]
