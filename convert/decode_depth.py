"""One token of a layer that reads or writes the depth stream.

The stream is the token's own: storage for it is made in every step, inside the graph.

B rows, C hidden width, H query heads, D head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ltconvert.convert.decode_layers import AttentionStep, Now, placed
from ltconvert.convert.students.blocks import DecoderLayer
from ltconvert.convert.students.depth_plan import ATTENTION, FFN, DepthVisit
from ltconvert.convert.students.depth_stream import DepthStream
from ltconvert.convert.students.static_layers import StaticKeys
from ltconvert.kernels.decode_attention import decode_attention_with_sum
from ltconvert.kernels.depth_attention import depth_only_attention
from ltconvert.kernels.depth_attention.reference import merge


class DepthNow:
    """The stream of one token, and the visit that has its turn."""

    def __init__(self, stream: DepthStream) -> None:
        self.stream = stream
        self.visit = DepthVisit()

    def turn(self, slot: int) -> None:
        """It is the turn of this visit."""
        self.visit = self.stream.plan.visits[slot]

    def leave(self, layer: DecoderLayer, before_BC: Tensor, after_BC: Tensor) -> None:
        """Write what the visit leaves, from the streams before and after its mixer."""
        slots = {}
        if ATTENTION in self.visit.writes:
            x_B1C = layer.mixer_input(before_BC[:, None])
            if ATTENTION in layer.depth_proj:
                slots[ATTENTION] = layer.depth_proj[ATTENTION](x_B1C)
            else:
                slots[ATTENTION] = layer.mixer.project(x_B1C)[1:]
        if FFN in self.visit.writes:
            slots[FFN] = layer.depth_proj[FFN](layer.mlp_input(after_BC[:, None]))
        self.stream.write(self.visit, slots)


class MixtureOfDepthsStep(AttentionStep):
    """Softmax attention over a slot's keys and the token's own depth."""

    def attend(self, qkv_BM: Tensor, cache_layer: StaticKeys, now: Now) -> Tensor:
        """See ``AttentionStep``."""
        mixer: Any = self.layer.mixer
        assert now.depth is not None
        view = now.depth.stream.view(now.depth.visit)
        if not view.count:
            return super().attend(qkv_BM, cache_layer, now)
        q_BHD = placed(qkv_BM, mixer, cache_layer, now)
        how = {"scale": mixer.spec.attention_scale, "soft_cap": mixer.spec.attention_softcap}
        o_BHD, log_sum_BH = decode_attention_with_sum(
            q_BHD, cache_layer.keys, cache_layer.values, now.used[cache_layer.slots], **how
        )
        left = view.slots[mixer.depth_rope_name]
        depth = depth_only_attention(
            q_BHD[:, None], left.keys_BTNGD, left.values_BTNGD, slots=view.count, **how
        )
        both = o_BHD[:, None], log_sum_BH[:, None], *depth
        merged_B1HD, *_ = merge(*both, view.schedule, mixer.depth_bias)
        return merged_B1HD[:, 0]
