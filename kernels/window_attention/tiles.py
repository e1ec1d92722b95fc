"""How many queries and keys a program of ``window_attention`` takes at once.

A short window is met by few tiles, of which larger ones hold more that it does not reach; over a
long reach larger tiles read less, and most of them are seen as a whole.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kernel = Literal["forward", "query gradient", "key gradient"]

NARROWEST = 64  # channels; narrower blocks gave wrong numbers on Hopper
LONG = 512  # tokens that a query sees, from which on tiles are larger


class Tile(NamedTuple):
    """Queries and keys, how Triton runs them, and whether blocks seen as a whole are apart."""

    queries: int
    keys: int
    warps: int
    stages: int
    split: bool = False


# By channels, those of 16-bit numbers; the fastest of some seven each on an H200 (docs/results.md).
OF_LONG: dict[tuple[Kernel, int], Tile] = {
    ("forward", 64): Tile(64, 64, 4, 3, True),
    ("forward", 128): Tile(64, 64, 4, 3, True),
    ("query gradient", 64): Tile(64, 64, 4, 3, True),
    ("query gradient", 128): Tile(128, 64, 8, 3, True),
    ("key gradient", 64): Tile(64, 64, 4, 2),
    ("key gradient", 128): Tile(64, 128, 8, 2),
}


def tile(kernel: Kernel, channels: int, itemsize: int, reach: int) -> Tile:
    """What a kernel takes at once.

    Args:
        channels: filled up to a power of 2.
        itemsize: bytes a number.
        reach: the most tokens that a query sees.
    """
    if reach >= LONG and itemsize == 2 and (kernel, channels) in OF_LONG:
        return OF_LONG[kernel, channels]
    warps = 4 if channels * itemsize <= 128 else 8
    return Tile(64, 64, warps, 2 if itemsize == 2 else 1)
