"""One token of a Dreamer: its layer's own ``forward``, with what differs for a token put in.

Nothing the host waits for: what tokens choose stays on the device, and the chosen experts' weights
are read where they stand.

B rows, C hidden width, H heads of depth attention, D their width, M channels of the heads together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ltconvert.convert.decode_layers import (
    ACTIVATIONS,
    Now,
    Stream,
    attended,
    norm_of,
    recurred,
    windowed,
)
from ltconvert.convert.decode_weights import join
from ltconvert.convert.mixers.gdn_window import WindowedGatedDeltaNet
from ltconvert.convert.students.dreamer.depth import DepthAttention
from ltconvert.convert.students.dreamer.layer import DreamerLayer, place_of
from ltconvert.convert.students.dreamer.pools import AttentionPool, Depth, SharedExpert
from ltconvert.convert.students.dreamer.recurrent import RecurrentPool
from ltconvert.convert.students.dreamer.router import Router, Routes
from ltconvert.convert.students.dreamer.rows import Mixture, PickedRows
from ltconvert.convert.students.dreamer.visit import Visit
from ltconvert.convert.students.loop import Step
from ltconvert.convert.students.static_layers import StaticKeys
from ltconvert.kernels.decode_attention import decode_attention
from ltconvert.kernels.decode_experts import decode_experts
from ltconvert.kernels.decode_heads import decode_heads
from ltconvert.kernels.decode_linear import GateActivation, decode_linear
from ltconvert.kernels.decode_route import decode_route


class DepthAttentionStep:
    """Depth attention of one token; its keys and values are written over those of the last one.

    Args:
        rows: B.
    """

    def __init__(self, attention: DepthAttention, rows: int) -> None:
        self.attention = attention
        self.weight, _ = join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.heads = attention.q_proj.out_features // attention.head_dim
        depths, device = attention.depths, self.weight.device
        with torch.inference_mode(False):
            shape = rows, self.heads, attention.head_dim
            self.kept = StaticKeys(shape, None, depths, dtype=self.weight.dtype, device=device)
            self.number_NB = torch.arange(depths, device=device).repeat_interleave(rows)
            self.number_NB = self.number_NB.view(depths, rows)
            self.tables = [table[:, None].repeat(1, rows, 1) for table in attention.tables(device)]

    def __call__(self, h_BC: Tensor, depth: int) -> Tensor:
        """The stream [B, C] with what it adds, nothing at the first depth."""
        part, number_B = self.attention, self.number_NB[depth]
        qkv_BM = decode_linear(h_BC, self.weight, **norm_of(part.norm))
        cos_BD, sin_BD = (table[depth] for table in self.tables)
        q_BHD = decode_heads(
            qkv_BM, self.kept.keys, self.kept.values, number_B, num_heads=self.heads,
            cos_BD=cos_BD, sin_BD=sin_BD,
        )  # fmt: skip
        if not depth:
            return h_BC
        scale = part.head_dim**-0.5
        o_BHD = decode_attention(q_BHD, self.kept.keys, self.kept.values, number_B, scale=scale)
        return decode_linear(o_BHD.flatten(1), part.o_proj.weight, residual_BO=h_BC)


class SharedExpertStep:
    """The expert that is always on, for one token.

    Args:
        rows: B.
    """

    def __init__(self, expert: SharedExpert, activation: GateActivation, rows: int) -> None:
        self.gate_up, _ = join([expert.gate_proj, expert.up_proj])
        self.down, self.activation = expert.down_proj.weight, activation
        with torch.inference_mode(False):
            self.itself_B1 = torch.zeros(rows, 1, dtype=torch.int64, device=self.gate_up.device)

    def __call__(self, h_BC: Tensor, x_BC: Tensor, top_B: Tensor) -> Tensor:
        """The stream [B, C] with what it adds."""
        m_BI = decode_linear(x_BC, self.gate_up, swiglu=True, activation=self.activation)
        given = m_BI, self.down[None], None, self.itself_B1, top_B[:, None]
        return decode_experts(*given, residual_NO=h_BC)


class Parts(NamedTuple):
    """What all depths share; None where the layer has none, or of an activation without kernel."""

    depths: DepthAttentionStep | None
    shared: SharedExpertStep | None
    activation: GateActivation | None

    @classmethod
    def of(cls, layer: DreamerLayer, rows: int) -> Parts:
        """Of a layer, for B rows."""
        depths = None if layer.depth is None else DepthAttentionStep(layer.depth, rows)
        activation, shared = ACTIVATIONS.get(layer.spec.hidden_act), None
        if layer.shared is not None and activation is not None:
            shared = SharedExpertStep(layer.shared, activation, rows)
        return cls(depths, shared, activation)


@dataclass(frozen=True)
class TokenVisit(Visit):
    """Of one token; see ``Visit``."""

    parts: Parts
    cache_layer: Any
    now: Now

    def look_back(self, attention: DepthAttention, h_BTC: Tensor) -> tuple[Tensor, None]:
        """See ``Visit``; what it leaves is kept here."""
        assert self.parts.depths is not None
        return self.parts.depths(h_BTC[:, 0], self.depth)[:, None], None

    def share(self, expert: SharedExpert, h_NC: Tensor, x_NC: Tensor, top_N: Tensor) -> Tensor:
        """See ``Visit``."""
        share = partial(super().share, expert) if self.parts.shared is None else self.parts.shared
        return share(h_NC, x_NC, top_N)

    def route(self, router: Router, h_BTC: Tensor, eps: float) -> tuple[Tensor, Routes]:
        """See ``Visit``."""
        x_BC, *found = decode_route(
            h_BTC[:, 0], router.keys, router.depth_logits[self.depth], router.balance,
            top=router.top, total=router.slices, by_scores=router.select_by == "scores", eps=eps,
        )  # fmt: skip
        return x_BC[:, None], Routes(*found)

    def heads(self, y_BTO: Tensor, mixture: Mixture, pool: AttentionPool, at: Depth) -> Tensor:
        """See ``Visit``."""
        projected, qkv_BM = pool.split(y_BTO, mixture), y_BTO[:, 0, : sum(pool.widths[:3])]
        if pool.spec.qk_norm is not None:
            qkv_BM = torch.cat([y.flatten(1) for y in projected[:3]], dim=-1)
        if isinstance(pool, RecurrentPool):
            o_BHD = self._recurred(qkv_BM, pool.cores[at.layer], projected[3:-1])
        else:
            o_BHD = attended(qkv_BM, pool.spec, at.rope_name, self.cache_layer, self.now)
        return o_BHD.flatten(1)[:, None]

    def own_rows(self, router: Router) -> PickedRows:
        """See ``Visit``: as if every row had chosen the layer's own at weight 1."""
        rows, slices = len(self.now.positions_B), router.slices
        first, device = self.layer * slices, self.release.device
        own_NK = torch.arange(first, first + slices, device=device).expand(rows, -1)
        weights_NK = torch.ones(rows, slices, device=device)
        return PickedRows(own_NK, weights_NK, router.experts, 0, self.parts.activation)

    def chosen_rows(self, routes: Routes, router: Router) -> PickedRows:
        """See ``Visit``."""
        chosen = routes.chosen_NK, routes.weights_NK, router.experts, router.nulls
        return PickedRows(*chosen, self.parts.activation)

    def _recurred(self, qkv_BM: Tensor, core: Any, others: Sequence[Tensor]) -> Tensor:
        rates = len(core.RATES)
        narrow = [y[:, 0] for y in others]
        in_order = [narrow[rates], *narrow[:rates], *narrow[rates + 1 :]]  # the gate first
        heads = windowed if isinstance(core, WindowedGatedDeltaNet) else recurred
        return heads(qkv_BM, in_order, core, self.cache_layer, self.now)


class DreamerStep:
    """A Dreamer's layer at one depth."""

    def __init__(self, layer: DreamerLayer, step: Step, parts: Parts) -> None:
        self.layer, self.place, self.parts = layer, place_of(layer, step), parts

    def __call__(self, stream: Stream, cache_layer: Any, now: Now, behind: None) -> Stream:
        """See ``LayerStep``; no norm behind it is known."""
        visit = TokenVisit(**self.place, parts=self.parts, cache_layer=cache_layer, now=now)
        h_B1C, _ = self.layer(stream.h_BC[:, None], visit)
        return Stream(h_B1C[:, 0])


def dreamer_steps(layer: DreamerLayer, schedule: Sequence[Step], rows: int) -> list[DreamerStep]:
    """The step of every depth, for B rows."""
    parts = Parts.of(layer, rows)
    return [DreamerStep(layer, step, parts) for step in schedule]
