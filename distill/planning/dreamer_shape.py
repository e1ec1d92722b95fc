"""The size of a Dreamer in a few numbers, and its footprint by arithmetic.

A search looks at thousands of shapes, too many to build; tests hold the arithmetic against counted
parameters of built models.

C hidden width, H query and G key/value heads of width D, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.distill.planning.footprint import Footprint
from ltconvert.errors import UserError

NUMBERS = ("depths", "width", "heads", "entries", "top_experts")
WIDTH_STEP = 64  # channels of the residual stream
INNER_STEP = 16  # channels of an expert: whole 32 bytes in half precision
CACHE_ITEM_BYTES = 2


@dataclass(frozen=True)
class DreamerShape:
    """How large a Dreamer is once its routing is learned.

    Its NUMBERS are how often the layer runs, the channels of the stream, key/value heads (query
    heads go with them), entries of the pool of attention (each comes with the experts of one MLP)
    and experts that a token uses at a depth.

    Attributes:
        spec: architecture of a teacher with one layer a depth.
        mlp_ratio: width of an MLP by channel of the stream.
    """

    spec: TeacherSpec
    dreamer: DreamerConfig
    mlp_ratio: float

    @classmethod
    def at_start(
        cls, spec: TeacherSpec, schedule: Sequence[int], dreamer: DreamerConfig
    ) -> DreamerShape:
        """Of the Dreamer that a teacher becomes.

        Args:
            schedule: the teacher's layers in the order of its visits.
        """
        ratio = spec.intermediate_size / spec.hidden_size
        return cls(_unrolled(spec, schedule), dreamer, ratio)

    def number(self, name: str) -> int:
        """One of NUMBERS."""
        return {
            "depths": self.spec.num_layers,
            "width": self.spec.hidden_size,
            "heads": self.spec.num_key_value_heads,
            "entries": self.dreamer.entries,
            "top_experts": self.dreamer.top_experts,
        }[name]

    def moved(self, name: str, steps: int) -> Self | None:
        """The shape with one of NUMBERS so many steps larger; None where there is none."""
        step = WIDTH_STEP if name == "width" else 1
        return self.with_number(name, self.number(name) + steps * step)

    def with_number(self, name: str, value: int) -> Self | None:
        """The shape with one of NUMBERS so large; None where there is none."""
        if value == self.number(name):
            return self
        return None if value < 1 else getattr(self, f"_with_{name}")(value)

    def _with_depths(self, depths: int) -> Self:
        return replace(self, spec=_unrolled(self.spec, _again(self.spec.num_layers, depths)))

    def _with_width(self, width: int) -> Self:
        step = INNER_STEP * self.dreamer.slices
        inner = max(1, round(width * self.mlp_ratio / step)) * step
        return replace(self, spec=replace(self.spec, hidden_size=width, intermediate_size=inner))

    def _with_heads(self, heads: int) -> Self:
        group = self.spec.num_attention_heads // self.spec.num_key_value_heads
        spec = replace(self.spec, num_key_value_heads=heads, num_attention_heads=heads * group)
        return replace(self, spec=spec)

    def _with_entries(self, entries: int) -> Self | None:
        return self._with_pools(entries=entries, experts=entries * self.dreamer.slices)

    def _with_top_experts(self, top: int) -> Self | None:
        return self._with_pools(top_experts=top)

    def _with_pools(self, **sizes: Any) -> Self | None:
        try:
            return replace(self, dreamer=replace(self.dreamer, **sizes))
        except UserError:  # tokens would use more than there is, or less than an MLP
            return None

    def config(self) -> LT2Config:
        """Of the model itself."""
        return LT2Config.from_spec(self.spec, dreamer=vars(self.dreamer))

    def footprint(self, context_tokens: int) -> Footprint:
        """What it costs in rows of so many tokens; the same as a built model's."""
        spec, dreamer, depths = self.spec, self.dreamer, self.spec.num_layers
        entry, expert, rest = _entry(spec), _expert(spec, dreamer.slices), _rest(spec, dreamer)
        pools = dreamer.entries * entry + dreamer.experts * expert
        # A logit a depth and entry, a share a depth: added, not multiplied by.
        beside = depths * (_routed(dreamer) + dreamer.stream_norm)
        head = spec.vocab_size * spec.hidden_size
        outside = (1 if spec.tie_word_embeddings else 2) * head + spec.hidden_size
        outside += spec.hidden_size + 1 if spec.exit_gate else 0
        used = dreamer.top_entries * entry + dreamer.top_experts * expert + rest
        windows = [window or context_tokens + 1 for window in spec.layer_windows]
        attended = sum(min(context_tokens / 2, window) for window in windows)
        products = spec.num_attention_heads * attended + dreamer.depth_heads * sum(range(depths))
        kept = sum(min(context_tokens, window - 1) for window in windows) / context_tokens
        slot = 2 * spec.num_key_value_heads * spec.head_dim * CACHE_ITEM_BYTES
        return Footprint(
            parameters=outside + pools + rest + beside,
            active_parameters=depths * used + head,
            flops=2 * (depths * used + head) + 4 * spec.head_dim * products,
            memory_bytes=slot * kept,
        )


def _again(layers: int, depths: int) -> list[int]:
    """So many layers in turn."""
    return [depth % layers for depth in range(depths)]


def _unrolled(spec: TeacherSpec, schedule: Sequence[int]) -> TeacherSpec:
    """The same with a layer for every visit, and without what belongs to loops alone."""
    return replace(
        spec,
        num_layers=len(schedule),
        num_loops=1,
        loop_norm="last",
        initial_state_std=None,
        prelude_layers=0,
        coda_layers=0,
        layer_rope=tuple(spec.layer_rope[i] for i in schedule),
        layer_windows=tuple(spec.layer_windows[i] for i in schedule),
    )


def _norms(spec: TeacherSpec) -> int:
    """Gains behind a branch; those before it are part of the matrices."""
    return 0 if spec.norm_layout == "pre" else spec.hidden_size


def _entry(spec: TeacherSpec) -> int:
    """Parameters of an entry of the pool of attention."""
    query = spec.num_attention_heads * spec.head_dim
    key = spec.num_key_value_heads * spec.head_dim
    size = spec.hidden_size * (2 * query + 2 * key) + _norms(spec)
    size += (query + 2 * key) * spec.qkv_bias + spec.hidden_size * spec.o_bias
    if spec.qk_norm == "head":
        return size + 2 * spec.head_dim
    return size + (query + key if spec.qk_norm == "full" else 0)


def _expert(spec: TeacherSpec, slices: int) -> int:
    """Parameters of a slice of an MLP."""
    inner = spec.intermediate_size // slices
    size = 3 * spec.hidden_size * inner + _norms(spec)
    return size + (2 * inner + spec.hidden_size) * spec.mlp_bias


def _routed(dreamer: DreamerConfig) -> int:
    """What routers choose from."""
    return dreamer.entries + dreamer.experts + dreamer.null_entries + dreamer.null_experts


def _rest(spec: TeacherSpec, dreamer: DreamerConfig) -> int:
    """What every visit multiplies by: routers' keys, depth attention, the shared expert."""
    width = spec.hidden_size
    keys = _routed(dreamer) * width
    depth_width = dreamer.depth_heads * spec.head_dim
    depth = 4 * width * depth_width + width if dreamer.depth_heads else 0
    return keys + depth + 3 * width * dreamer.shared_size
