"""One token of a whole model over a static cache; with all its loops a CUDA graph can hold it.

B rows, C hidden width, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor, nn

from ltconvert.convert.decode_depth import DepthNow, MixtureOfDepthsStep
from ltconvert.convert.decode_dreamer import DreamerStep, dreamer_steps
from ltconvert.convert.decode_layers import (
    AttentionStep,
    LayerStep,
    LinearStep,
    Now,
    Stream,
    WindowedGatedDeltaNetStep,
    norm_of,
    normed,
)
from ltconvert.convert.decode_sparse import BlockSparseAttentionStep, SparseAttentionStep
from ltconvert.convert.mixers.attention import Attention
from ltconvert.convert.mixers.dsa import SparseAttention
from ltconvert.convert.mixers.gdn_window import WindowedGatedDeltaNet
from ltconvert.convert.mixers.linear import LinearMixer
from ltconvert.convert.mixers.moda import MixtureOfDepths
from ltconvert.convert.mixers.nsa import BlockSparseAttention
from ltconvert.convert.students.blocks import DecoderLayer
from ltconvert.convert.students.depth import depth_stream
from ltconvert.convert.students.exits import Leaving, core_layers, leaving
from ltconvert.convert.students.loop import Step as Visit
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.students.merge import in_loop
from ltconvert.convert.students.static_cache import StaticCache
from ltconvert.convert.students.static_layers import StaticKeys, StaticKeysAndState
from ltconvert.kernels.decode_linear import decode_linear
from ltconvert.kernels.overlap import overlapping

EARLY_ROWS = 1  # more rows are slower for it: what waits keeps its place on the GPU from what runs


class Step:
    """The whole model: token ids [B] -> logits [B, V]; the cache takes the token in.

    Args:
        exit_threshold: leave the loops early, as ``LT2Model.forward`` does; the host then waits for
            the gate after every loop. None computes all.

    Raises:
        ValueError: a mixer that has no one-token form, or a threshold without an exit gate.
    """

    def __init__(
        self, model: LT2ForCausalLM, cache: StaticCache, exit_threshold: float | None = None
    ) -> None:
        self.model, self.cache = model, cache
        self.exits = leaving(model.model, exit_threshold) is not None
        self.exit_threshold = exit_threshold
        self.layers: Sequence[LayerStep | DreamerStep] = _layer_steps(model, cache.batch)
        self.behind = _norms_behind(model.model.schedule, self.layers)
        # A Dreamer may go on behind the visit that closed its only loop.
        self.closing = [visit for visit in model.model.schedule if visit.closes_loop][-1]
        kinds = [layer for layer in cache.layers if isinstance(layer, StaticKeys)]
        self.sizes = sorted({layer.slots for layer in kinds})
        both = [layer for layer in kinds if isinstance(layer, StaticKeysAndState)]
        self.windows = sorted({layer.window for layer in both if layer.window is not None})
        heads = model.model.spec.num_attention_heads
        with torch.inference_mode(False):
            self.first_B = torch.zeros_like(cache.lengths_B)
            size = cache.batch, heads
            self.arrivals_BH = torch.zeros(size, dtype=torch.int32, device=cache.lengths_B.device)

    def __call__(self, token_B: Tensor) -> Tensor:
        """One token a row at the position that its length says; lengths grow by one.

        The caller sees to it that rows have room: what a full cache does with more is undefined.
        """
        early = token_B.shape[0] <= EARLY_ROWS and not self.exits
        with overlapping() if early else nullcontext():
            return self._step(token_B)

    def _step(self, token_B: Tensor) -> Tensor:
        decoder, core = self.model.model, core_layers(self.model.model)
        leaves, left = leaving(decoder, self.exit_threshold), False
        kept: dict[LayerStep, Tensor] = {}
        seen: dict[int, LayerStep] = {}  # by physical layer, the step of its last visit
        now = self._now(kept if self.exits else None)
        # Behind `now`: what is launched here ends what kernels of the layers may not wait for.
        h_BC = loop_in_BC = prelude_BC = decoder.embed(token_B)
        ready_BC: Tensor | None = None
        for visit, behind in zip(decoder.schedule, self.behind, strict=True):
            layer, cache_layer = self.layers[visit.slot], self.cache.layers[visit.slot]
            if left and visit.layer in core:
                layer = seen[visit.layer]
                layer.take_in(kept[layer], cache_layer, now)
                continue
            if visit.opens_loop and decoder.injection is not None:
                if visit.loop == 0:
                    prelude_BC, h_BC = h_BC, decoder.injection.first(h_BC, now.positions_B)
                h_BC = decoder.injection(h_BC, prelude_BC)
            if visit.opens_loop:
                loop_in_BC = h_BC
            if now.depth is not None:
                now.depth.turn(visit.slot)
            h_BC, ready_BC = layer(Stream(h_BC, ready_BC), cache_layer, now, behind)
            seen[visit.layer] = layer
            if visit.closes_loop and decoder.loop_residual is not None:
                h_BC = h_BC + decoder.loop_residual[visit.loop].to(h_BC.dtype) * loop_in_BC
            if visit.closes_loop:
                h_BC, left = self._close(visit, h_BC, leaves)
        logits_BV = decode_linear(h_BC, self.model.head_weight, **norm_of(decoder.norm))
        self.cache.lengths_B += 1  # not ahead of the head, which begins early
        cap = self.model.config.final_softcap
        return logits_BV if cap is None else cap * torch.tanh(logits_BV / cap)

    def _close(self, visit: Visit, h_BC: Tensor, leaves: Leaving | None) -> tuple[Tensor, bool]:
        """The stream behind a loop, normed where the family does so, and whether it was the last.

        The norm at the very end is part of the head's product.
        """
        decoder, last = self.model.model, self.model.model.schedule[-1]
        closes = decoder.spec.norm_closes(visit.loop)
        at_end = visit is self.closing
        next_BC = normed(h_BC, decoder.norm) if closes and visit is not last else h_BC
        left = at_end
        if leaves is not None and not at_end:
            left = leaves.after(next_BC if closes else normed(h_BC, decoder.norm))
        if leaves is not None and left:
            self.cache.count_loops(visit.loop + 1)
        return (h_BC if left and last.closes_loop else next_BC), left

    def _now(self, kept: dict[LayerStep, Tensor] | None) -> Now:
        lengths_B, full = self.cache.lengths_B, self.cache.max_length
        after_B = lengths_B + 1
        ropes = self.model.model._ropes.items()
        tables = {name: rope(lengths_B[:, None]) for name, rope in ropes}
        stream = depth_stream(self.model.model, tables)
        return Now(
            rope={name: (cos[:, 0], sin[:, 0]) for name, (cos, sin) in tables.items()},
            positions_B=lengths_B,
            # What has room for all tokens is no ring: nothing to compute, and no launch.
            slots={n: lengths_B if n == full else lengths_B % n for n in self.sizes},
            used={n: after_B if n == full else after_B.clamp(max=n) for n in self.sizes},
            outside={window: lengths_B >= window for window in self.windows},
            first=self.first_B,
            arrivals=self.arrivals_BH,
            kept=kept,
            depth=None if stream is None else DepthNow(stream),
        )


def _layer_steps(model: LT2ForCausalLM, rows: int) -> Sequence[LayerStep | DreamerStep]:
    """The step of every visit: one a layer, and one a loop where loops have tensors of their own.

    A correction would be two more launches a matrix; merged, a visit reads as much as in a dense
    model, and the memory of the merged copies is what that takes.
    """
    inner = model.model
    if inner.dreamer is not None:
        return dreamer_steps(inner.dreamer, inner.schedule, rows)
    steps: dict[tuple[int, int], LayerStep] = {}
    found = []
    for visit in inner.schedule:
        loops, _ = inner.spec.own_tensors(visit.layer)
        key = visit.layer, visit.loop if loops > 1 else 0
        if key not in steps:
            layer = inner.layers[visit.layer]
            steps[key] = layer_step(layer if loops == 1 else in_loop(layer, visit.loop))
        found.append(steps[key])
    return found


def _norms_behind(
    schedule: Sequence[Visit], layers: Sequence[LayerStep | DreamerStep]
) -> list[nn.Module | None]:
    """By visit, the norm that reads its stream next; None where something else does."""
    found: list[nn.Module | None] = [None] * len(schedule)
    for index, (visit, following) in enumerate(pairwise(schedule)):
        layer = layers[following.slot].layer
        if not visit.closes_loop and not following.opens_loop and isinstance(layer, DecoderLayer):
            found[index] = layer.pre_mixer_norm
    return found


def layer_step(layer: DecoderLayer) -> LayerStep:
    """The one-token form of a layer.

    Raises:
        ValueError: its mixer has none.
    """
    mixer = layer.mixer
    if isinstance(mixer, SparseAttention):
        return SparseAttentionStep(layer)
    if isinstance(mixer, BlockSparseAttention):
        return BlockSparseAttentionStep(layer)
    if isinstance(mixer, MixtureOfDepths):
        return MixtureOfDepthsStep(layer)
    if isinstance(mixer, Attention):
        return AttentionStep(layer)
    if isinstance(mixer, WindowedGatedDeltaNet):
        return WindowedGatedDeltaNetStep(layer)
    if isinstance(mixer, LinearMixer):
        return LinearStep(layer)
    raise ValueError(f"a {mixer.kind} mixer has no one-token step; use the model's own generate()")
