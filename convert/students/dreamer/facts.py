"""How much of a Dreamer a token uses at one depth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from torch import nn

from ltconvert.convert.students.dreamer.layer import DreamerLayer


def active_parameters(layer: DreamerLayer, depths: Sequence[int]) -> tuple[int, int]:
    """(All, those of attention and of what stands before it) that a visit multiplies by.

    Args:
        depths: of the visits, of which this is the mean; without any it is 0.
    """
    if not depths:
        return 0, 0
    config, last = layer.config, len(layer.windows) - 1
    attention = _share(layer.attention.parts(), Fraction(config.top_entries, config.entries))
    attention += layer.attention.core_parameters() + layer.attention_router.keys.numel()
    experts = _share(layer.experts.parts(), Fraction(config.top_experts, config.experts))
    router = layer.expert_router.keys.numel()
    at = [min(depth, last) for depth in depths]
    attends = sum(depth not in config.skipped_attention for depth in at)
    thinks = sum(depth not in config.skipped_experts for depth in at)
    routes = len(at) if layer.shared is not None else thinks
    before = _values(layer.depth) + attention * attends // len(at)
    return before + (experts * thinks + router * routes) // len(at) + _values(layer.shared), before


def routed_rows(layer: DreamerLayer) -> int:
    """Vectors that stand for a token, at most, while routing is released: chosen and own ones."""
    config = layer.config
    return 1 + max(config.top_entries, -(-config.top_experts // config.slices))


def mean_depth_keys(layer: DreamerLayer) -> float:
    """Earlier depths that a query sees on average, in heads of the teacher's attention."""
    others = len(layer.windows) - 1
    return others / 2 * layer.config.depth_heads / layer.spec.num_attention_heads


def depth_width(layer: DreamerLayer) -> int:
    """Values a token in the keys and values of all depths."""
    return 2 * (len(layer.windows) - 1) * layer.config.depth_heads * layer.spec.head_dim


def _share(parts: Iterable[nn.Module], share: Fraction) -> int:
    """Of the values in a pool's parts."""
    return int(sum(map(_values, parts)) * share)


def _values(part: nn.Module | None) -> int:
    """In a part; 0 where there is none."""
    return 0 if part is None else sum(parameter.numel() for parameter in part.parameters())
