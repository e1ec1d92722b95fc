"""Mixture-of-depths attention (arXiv 2603.15619): a token looks at itself in earlier layers, too.

B rows, T new tokens, S keys, N slots, C hidden width, H query heads, G key/value heads, D head
width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ltconvert.convert.mixers.attention import Attention
from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.kernels.depth_attention import depth_attention

Slot = tuple[Tensor, Tensor]


class SlotProjection(nn.Module):
    """Keys and values of a slot from what a sublayer reads: linear, keys normed as the family's.

    In a converted model values start as those of an attention, and keys at 0, so that all slots
    weigh the same. An attention's own keys would be foreign: the queries of other layers have
    never met them, and some of the scores are so large that they are all that such a query sees.
    """

    def __init__(self, spec: TeacherSpec) -> None:
        super().__init__()
        self.head_dim, self.qk_norm = spec.head_dim, spec.qk_norm
        width = spec.num_key_value_heads * spec.head_dim
        self.k_proj = nn.Linear(spec.hidden_size, width, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden_size, width, bias=spec.qkv_bias)
        if spec.qk_norm is not None:
            size = spec.head_dim if spec.qk_norm == "head" else width
            self.k_norm = RMSNorm(size, spec.rms_norm_eps, spec.norm_offset)

    def forward(self, x_BTC: Tensor) -> Slot:
        """x [B, T, C] -> key and value, each [B, T, G, D], without positions."""
        k, v = self.k_proj(x_BTC), self.v_proj(x_BTC)
        if self.qk_norm == "full":
            k = self.k_norm(k)
        k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (k, v))
        return (self.k_norm(k) if self.qk_norm == "head" else k), v

    @torch.no_grad()
    def inherit(self, attention: Mapping[str, Tensor]) -> None:
        """Start with the values of an attention; of loops that differ, the first one's."""
        for name, parameter in self.named_parameters():
            value = attention[name]
            parameter.copy_(value if value.shape == parameter.shape else value[0])
        if self.qk_norm is not None:  # of a key of 0 the norm would make one of full length
            self.k_norm.weight.fill_(-self.k_norm.offset)
            return
        for parameter in self.k_proj.parameters():
            parameter.zero_()


class MixtureOfDepths(Attention):
    """Attention whose softmax also runs over the keys that earlier sublayers left at the token.

    ``o = o_seq + s * sigmoid(lse_depth + b - lse_seq) * (o_depth - o_seq)``: with s = 0 the
    teacher's attention, with s = 1 and b = 0 one softmax over all keys, as published. Without a
    depth stream in the context it is the teacher's attention, too.

    Args:
        rope: depth keys stand at the token's own position (relative distance 0); else, as
            published, they have none while queries do.
        bias: where a learned b for each head starts; None: there is none.
    """

    kind = "moda"
    converted = False

    def __init__(
        self,
        spec: TeacherSpec,
        layer: int,
        *,
        window: int | None,
        sdpa_gate: bool,
        rope: bool,
        bias: float | None,
    ) -> None:
        super().__init__(spec, layer, window=window, sdpa_gate=sdpa_gate)
        self.depth_rope_name = self.rope_name if rope else None
        self.depth_bias = None
        if bias is not None:
            self.depth_bias = nn.Parameter(torch.full((self.num_heads,), float(bias)))

    def attend(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, context: SequenceContext
    ) -> Tensor:
        """softmax over the sequence and the token's own slots, [B, H, T, D]."""
        view, keep_BS = context.depth, context.keep_BS
        if view is None or not view.count:
            return super().attend(q_BHTD, k_BGSD, v_BGSD, context)
        left = view.slots[self.depth_rope_name]
        o_BTHD, _, _ = depth_attention(
            q_BHTD.transpose(1, 2),
            k_BGSD.transpose(1, 2),
            v_BGSD.transpose(1, 2),
            left.keys_BTNGD,
            left.values_BTNGD,
            slots=view.count,
            gradients=left.gradients,
            scale=self.spec.attention_scale,
            schedule=view.schedule,
            bias_H=self.depth_bias,
            window=self.window,
            soft_cap=self.spec.attention_softcap,
            bounds=context.bounds(),
            keep_BS=None if keep_BS is None else keep_BS[:, -k_BGSD.shape[2] :],
        )
        return o_BTHD.transpose(1, 2)
