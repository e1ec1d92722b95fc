"""Scores in the unit that kernels' exponentials, which are of 2, take them in."""

from __future__ import annotations

import math


def base_two(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Factor of products and cap (1 where there is none); a capped product is ``tanh(x) * cap``."""
    log2_e = math.log2(math.e)
    return (scale * log2_e, 1.0) if soft_cap is None else (scale / soft_cap, soft_cap * log2_e)
