"""Token mixers: one file each, one interface for all.

A mixer is a module with ``forward(x_BTC, context, cache_layer) -> y_BTC`` (after the pre norm, up
to and including the output projection), ``kind``, and ``inherit(teacher tensors) -> own tensors``.
``take_in(kept, context, cache_layer)`` puts what ``forward`` last gave to ``context.keep`` into the
cache of another visit, as if that visit had read the same input, and computes nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from ltconvert.convert.mixers.attention import Attention, Projections, WindowAttention
from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.deltanet import DeltaNet
from ltconvert.convert.mixers.dsa import SparseAttention
from ltconvert.convert.mixers.gdn import GatedDeltaNet
from ltconvert.convert.mixers.gdn_window import WindowedGatedDeltaNet
from ltconvert.convert.mixers.kda import KimiDeltaAttention
from ltconvert.convert.mixers.linear import LinearMixer
from ltconvert.convert.mixers.mamba2 import Mamba2
from ltconvert.convert.mixers.moda import MixtureOfDepths
from ltconvert.convert.mixers.nsa import BlockSparseAttention
from ltconvert.convert.mixers.retnet import Retention
from ltconvert.convert.teachers.spec import TeacherSpec

MIXERS: dict[str, type[Projections]] = {
    "full": Attention,
    "window": WindowAttention,
    "gdn": GatedDeltaNet,
    "gdn_window": WindowedGatedDeltaNet,
    "deltanet": DeltaNet,
    "kda": KimiDeltaAttention,
    "mamba2": Mamba2,
    "retnet": Retention,
    "dsa": SparseAttention,
    "nsa": BlockSparseAttention,
    "moda": MixtureOfDepths,
}

__all__ = ["MIXERS", "MixtureOfDepths", "Projections", "SequenceContext", "make_mixer"]


def make_mixer(
    kind: str,
    spec: TeacherSpec,
    layer: int,
    *,
    window_tokens: int | Sequence[int],
    conv_size: int | None,
    sdpa_gate: bool,
    top_k_tokens: int,
    index_heads: int,
    block_tokens: int,
    chosen_blocks: int,
    depth_rope: bool,
    depth_bias: float | None,
) -> Projections:
    """A mixer for one physical layer.

    Raises:
        ValueError: ``kind`` is not one of MIXERS.
    """
    if kind not in MIXERS:
        raise ValueError(f"unknown mixer {kind!r}; choose one of {', '.join(MIXERS)}")
    made = MIXERS[kind]
    if issubclass(made, LinearMixer) and not made.keeps_keys:
        return made(spec, layer, conv_size=conv_size)
    if kind == "dsa":
        return SparseAttention(spec, layer, top_k=top_k_tokens, index_heads=index_heads)
    window = spec.layer_windows[layer]
    wanted = [window_tokens] if isinstance(window_tokens, int) else window_tokens
    if kind == "nsa":
        return BlockSparseAttention(
            spec, layer, window=wanted[0], block=block_tokens, chosen=chosen_blocks
        )
    narrow = [min(tokens, window or tokens) for tokens in wanted]
    if kind == "gdn_window":
        return WindowedGatedDeltaNet(spec, layer, conv_size=conv_size, window=narrow[0])
    if kind == "window":
        return WindowAttention(spec, layer, windows=narrow)
    if kind == "moda":
        return MixtureOfDepths(
            spec, layer, window=window, sdpa_gate=sdpa_gate, rope=depth_rope, bias=depth_bias
        )
    return Attention(spec, layer, window=window, sdpa_gate=sdpa_gate)
