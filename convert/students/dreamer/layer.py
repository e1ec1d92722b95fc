"""The layer of a Dreamer, and what one pass through the model carries from depth to depth.

B rows, T tokens, N = B T, C hidden width, H heads of depth attention, D their width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ltconvert.convert.mixers import SequenceContext
from ltconvert.convert.mixers.linear import LinearMixer
from ltconvert.convert.students.dreamer.banks import Stacks, stacks_of
from ltconvert.convert.students.dreamer.config import DreamerConfig
from ltconvert.convert.students.dreamer.depth import DepthAttention
from ltconvert.convert.students.dreamer.pools import (
    Depth,
    ExpertPool,
    SharedExpert,
    attend,
    gated,
    unit_rms,
)
from ltconvert.convert.students.dreamer.recurrent import sequence_pool
from ltconvert.convert.students.dreamer.router import Router, Routes
from ltconvert.convert.students.dreamer.visit import Left, PassVisit, Visit
from ltconvert.convert.students.loop import Step
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.kernels.depth_attention import DepthSlots, new_slots, write_slot


class DreamerLayer(nn.Module):
    """``h += depth attention; h += sequence attention; h += expert attention``, at every depth.

    Routing is ``(1 - r) own + r chosen``: outputs of the experts that the depth's layer had, and of
    those that the router chooses. With r = 0, depth attention and the shared expert at their start,
    this is the teacher; with r = 1 nothing of what was forced is left.

    Args:
        windows: of the softmax attention at each depth.
        mixers: linear ones, of each layer of the teacher, where it has these.

    Attributes:
        release: r, moved by training; saved with the weights. Set it by ``set_release``.
    """

    release: Tensor

    def __init__(
        self,
        spec: TeacherSpec,
        config: DreamerConfig,
        schedule: tuple[Step, ...],
        windows: list[int | None],
        mixers: Sequence[LinearMixer] = (),
    ) -> None:
        super().__init__()
        self.spec, self.config = spec, config
        layers = [step.layer for step in schedule]
        self.ropes, self.windows = [spec.layer_rope[i] for i in layers], windows
        depths, width = len(layers), spec.hidden_size
        self.register_buffer("release", torch.zeros(()))
        self._known: tuple[Tensor, int, float] | None = None  # a tensor, its version, its value
        self.depth = (
            DepthAttention(spec, depths, config.depth_heads) if config.depth_heads else None
        )
        self.attention = sequence_pool(spec, config.entries, mixers)
        self.attention_router = Router(
            width, config.entries, layers, slices=1, top=config.top_entries,
            select_by=config.select_by, nulls=config.null_entries,
        )  # fmt: skip
        self.experts = ExpertPool(spec, config.experts, config.slices)
        self.expert_router = Router(
            width, config.experts, layers, slices=config.slices, top=config.top_experts,
            select_by=config.select_by, nulls=config.null_experts,
        )  # fmt: skip
        self.shared = SharedExpert(spec, config.shared_size) if config.shared_size else None
        self.normed_share = nn.Parameter(torch.zeros(depths)) if config.stream_norm else None

    def reset_parameters(self) -> None:
        """The start: routing forced, nothing of the stream normed."""
        nn.init.zeros_(self.release)
        if self.normed_share is not None:
            nn.init.zeros_(self.normed_share)

    def new_parameters(self) -> list[nn.Parameter]:
        """What the teacher does not have: everything but the pools."""
        pools = {*self.attention.parameters(), *self.experts.parameters()}
        return [parameter for parameter in self.parameters() if parameter not in pools]

    def compile_with(self, wrap: Callable[[Any], Any]) -> None:
        """Call what ``wrap`` makes of the parts that are the same at all depths."""
        self.attention.attend = wrap(attend)
        self.experts.gated = wrap(gated)

    def set_release(self, share: float) -> None:
        """Set r, from 0 to 1."""
        self.release.fill_(share)
        self._known = self.release, _version(self.release), share

    def released(self) -> float:
        """r; the device is asked once for each value that it has had."""
        tensor, version, share = self._known or (None, 0, 0.0)
        if tensor is not self.release or version != _version(self.release):
            share = float(self.release)
            self._known = self.release, _version(self.release), share
        return share

    def forward(self, h_BTC: Tensor, visit: Visit) -> tuple[Tensor, Left]:
        """h [B, T, C] at one depth -> (h, what the visit leaves)."""
        after_BTC, slot = h_BTC, None
        if self.depth is not None:
            after_BTC, slot = visit.look_back(self.depth, h_BTC)
        if not self.config.parallel:
            h_BTC = after_BTC
        h_BTC, entries = self._with_attention(h_BTC, after_BTC, visit)
        h_BTC, experts = self._with_experts(h_BTC, visit)
        if self.normed_share is not None:
            share = self.normed_share[visit.depth].to(h_BTC.dtype)
            h_BTC = h_BTC + share * (self._normed(h_BTC) - h_BTC)
        return h_BTC, Left(entries, experts, slot)

    def _with_attention(
        self, h_BTC: Tensor, after_BTC: Tensor, visit: Visit
    ) -> tuple[Tensor, Routes | None]:
        """``after_BTC`` with what attention to h adds, and what was chosen."""
        router = self.attention_router
        if not visit.attends:
            return after_BTC, None
        x_BTC, routes = self._routed(h_BTC, router, visit, visit.learned)
        mixture = visit.mixture(routes, router)
        at = Depth(visit.layer, self.ropes[visit.depth], self.windows[visit.depth])
        heads = partial(visit.heads, pool=self.attention, at=at)
        return self.attention(after_BTC, self._read(h_BTC, x_BTC), mixture, heads), routes

    def _with_experts(self, h_BTC: Tensor, visit: Visit) -> tuple[Tensor, Routes | None]:
        """The stream with what the experts add, the shared one among them, and what was chosen."""
        router, after_BTC = self.expert_router, h_BTC
        if not visit.thinks and self.shared is None:
            return h_BTC, None
        needed = (visit.learned and visit.thinks) or self.shared is not None
        x_BTC, routes = self._routed(h_BTC, router, visit, needed)
        if self.shared is not None:
            assert routes is not None
            h_NC, x_NC = h_BTC.flatten(0, 1), x_BTC.flatten(0, 1)
            after_BTC = visit.share(self.shared, h_NC, x_NC, routes.top_N).view_as(h_BTC)
        if not visit.thinks:
            return after_BTC, None
        mixture = visit.mixture(routes, router)
        after_BTC = self.experts(after_BTC, self._read(h_BTC, x_BTC), mixture)
        return after_BTC, routes if visit.learned else None

    def _routed(
        self, h_BTC: Tensor, router: Router, visit: Visit, needed: bool
    ) -> tuple[Tensor, Routes | None]:
        """The normed stream, and what tokens choose where that is needed."""
        if not needed:
            return self._normed(h_BTC), None
        return visit.route(router, h_BTC, self.spec.rms_norm_eps)

    def _normed(self, h_BTC: Tensor) -> Tensor:
        return unit_rms(h_BTC, self.spec.rms_norm_eps)

    def _read(self, h_BTC: Tensor, x_BTC: Tensor) -> Tensor:
        """What branches read: the normed stream, where the family has norms before them."""
        return h_BTC if self.spec.norm_layout == "post" else x_BTC


def _version(tensor: Tensor) -> int:
    """Grows when a tensor is written to; tensors made in inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def place_of(layer: DreamerLayer, step: Step) -> dict[str, Any]:
    """The attributes that all visits have."""
    share, last = layer.released(), len(layer.windows) - 1
    depth = min(step.slot, last)  # visits beyond those it was made for are like the last
    return {
        "depth": depth,
        "layer": step.layer,
        "attends": depth not in layer.config.skipped_attention,
        "thinks": depth not in layer.config.skipped_experts,
        "forced": share < 1.0,
        "learned": share > 0.0,
        "release": layer.release,
    }


@dataclass
class DreamerPass:
    """One pass through the model.

    Attributes:
        routes: of the pools of attention and of MLPs, a pair a depth, once tokens choose.
    """

    layer: DreamerLayer
    stacks: Stacks
    slots: DepthSlots | None = None
    written: int = 0
    routes: list[tuple[Routes, Routes]] = field(default_factory=list)

    @classmethod
    def of(cls, layer: DreamerLayer) -> DreamerPass:
        """A new one."""
        slices = layer.config.slices
        stacks = stacks_of(layer.attention.parts(), 1) | stacks_of(layer.experts.parts(), slices)
        return cls(layer, stacks)

    def visit(self, step: Step, context: SequenceContext, cache_layer: Any = None) -> PassVisit:
        """What the layer sees at a step."""
        return PassVisit(
            **place_of(self.layer, step), stacks=self.stacks, slots=self.slots,
            context=context, cache_layer=cache_layer,
        )  # fmt: skip

    def take(self, left: Left, tokens: int) -> None:
        """Take in what a visit left; where a branch was skipped, its tokens chose nothing."""
        if self.layer.released() > 0.0:
            entries = left.entries or self.layer.attention_router.nothing(tokens)
            experts = left.experts or self.layer.expert_router.nothing(tokens)
            self.routes.append((entries.detach(), experts.detach()))
        if left.slot is None:
            return
        if self.slots is None:
            others, gradients = len(self.layer.windows) - 1, torch.is_grad_enabled()
            self.slots = new_slots(others, left.slot[0], gradients=gradients)
        self.slots = write_slot(self.slots, self.written, *left.slot)
        self.written += 1
