"""Methods that look at nothing: ``uniform`` and an explicit list."""

from __future__ import annotations

from collections.abc import Sequence

from ltconvert.distill.selection.result import Scores


def uniform_layers(keep: int, num_layers: int) -> list[int]:
    """``keep`` layers at even distances, the first layer among them: 9 of 36 are 0, 4, ..., 32."""
    return [index * num_layers // keep for index in range(keep)]


def given(layers: Sequence[int], num_layers: int) -> Scores:
    """A choice that needs no scores: those layers first, then the rest in their order."""
    rest = [layer for layer in range(num_layers) if layer not in set(layers)]
    return Scores(columns={}, ranking=[*layers, *rest], main=None)
