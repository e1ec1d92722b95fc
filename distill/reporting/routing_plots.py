"""Plots of routing and depth attention as PNG bytes."""

from __future__ import annotations

from collections.abc import Sequence

from ltconvert.distill.reporting.plots import figure_of, png_of


def load_map(load: Sequence[Sequence[float]], label: str) -> bytes:
    """The share of tokens that choose an entry, a row a depth."""
    height, width = 0.12 * len(load), 0.09 * len(load[0])
    figure, (axis,) = figure_of(min(9.0, max(4.5, width + 1.5)), min(7.0, max(2.2, height + 1.0)))
    image = axis.imshow(load, aspect="auto", cmap="Blues", vmin=0.0, interpolation="nearest")
    axis.set(xlabel=label, ylabel="depth")
    axis.grid(visible=False)
    figure.colorbar(image, ax=axis, label="share of tokens")
    return png_of(figure)


def depth_map(rows: Sequence[Sequence[float]]) -> bytes:
    """Weight that a depth's queries give to each earlier depth; later ones stay empty."""
    depths = max(len(row) for row in rows)
    square = [[*row, *([float("nan")] * (depths - len(row)))] for row in rows]
    figure, (axis,) = figure_of(4.6, 3.8)
    image = axis.imshow(square, cmap="viridis", vmin=0.0, interpolation="nearest")
    axis.set(xlabel="depth that is looked at", ylabel="depth that looks")
    axis.grid(visible=False)
    figure.colorbar(image, ax=axis, label="mean weight")
    return png_of(figure)
