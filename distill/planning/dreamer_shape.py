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
    def at_start(cls, spec: TeacherSpec, schedule: Sequence[int], **options: Any) -> DreamerShape:
        """Of the Dreamer that a teacher becomes.

        Args:
            schedule: the teacher's layers in the order of its visits.
            options: of ``DreamerConfig``, beside the sizes of its pools.

        Raises:
            UserError: the options do not fit the teacher.
        """
        slices = options.get("slices", 1)
        _check_slices(spec.intermediate_size, slices)
        pools = {"entries": spec.num_layers, "experts": spec.num_layers * slices}
        dreamer = DreamerConfig(**pools, **options)
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
        if value < 1:
            return None
        spec, dreamer = self.spec, self.dreamer
        if name == "depths":
            places = [spec.layer_rope[i % spec.num_layers] for i in range(value)]
            windows = [spec.layer_windows[i % spec.num_layers] for i in range(value)]
            spec = replace(
                spec, num_layers=value, layer_rope=tuple(places), layer_windows=tuple(windows)
            )
        elif name == "width":
            step = INNER_STEP * dreamer.slices
            inner = max(1, round(value * self.mlp_ratio / step)) * step
            spec = replace(spec, hidden_size=value, intermediate_size=inner)
        elif name == "heads":
            group = spec.num_attention_heads // spec.num_key_value_heads
            spec = replace(spec, num_key_value_heads=value, num_attention_heads=value * group)
        else:
            changed = {name: value}
            if name == "entries":
                changed["experts"] = value * dreamer.slices
            pools = {n: changed.get(n, getattr(dreamer, n)) for n in ("entries", "experts")}
            top = changed.get("top_experts", dreamer.top_experts)
            if not dreamer.slices <= top <= pools["experts"]:
                return None
            if dreamer.top_entries > pools["entries"]:
                return None
            dreamer = replace(dreamer, **changed)
        return replace(self, spec=spec, dreamer=dreamer)

    def config(self) -> LT2Config:
        """Of the model itself."""
        return LT2Config.from_spec(self.spec, dreamer=vars(self.dreamer))

    def footprint(self, context_tokens: int) -> Footprint:
        """What it costs in rows of so many tokens; the same as a built model's."""
        spec, dreamer, depths = self.spec, self.dreamer, self.spec.num_layers
        entry, expert, rest = _entry(spec), _expert(spec, dreamer.slices), _rest(spec, dreamer)
        pools = dreamer.entries * entry + dreamer.experts * expert
        # A logit a depth and entry, a share a depth: added, not multiplied by.
        beside = depths * (dreamer.entries + dreamer.experts + dreamer.stream_norm)
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


def _check_slices(width: int, slices: int) -> None:
    if width % slices:
        raise UserError(f"an MLP of width {width} does not divide into {slices} slices")


def _unrolled(spec: TeacherSpec, schedule: Sequence[int]) -> TeacherSpec:
    """The same with a layer for every visit."""
    return replace(
        spec,
        num_layers=len(schedule),
        num_loops=1,
        prelude_layers=0,
        coda_layers=0,
        layer_rope=tuple(spec.layer_rope[i] for i in schedule),
        layer_windows=tuple(spec.layer_windows[i] for i in schedule),
    )


def _norms(spec: TeacherSpec) -> int:
    """Gains before and behind a branch."""
    return (2 if spec.norm_layout == "sandwich" else 1) * spec.hidden_size


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


def _rest(spec: TeacherSpec, dreamer: DreamerConfig) -> int:
    """Parameters that every visit multiplies by: routers' keys, depth attention, the shared expert."""
    width = spec.hidden_size
    keys = (dreamer.entries + dreamer.experts) * width
    depth_width = dreamer.depth_heads * spec.head_dim
    depth = 4 * width * depth_width + width if dreamer.depth_heads else 0
    return keys + depth + 3 * width * dreamer.shared_size
