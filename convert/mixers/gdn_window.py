"""A window of softmax attention and Gated DeltaNet in one mixer, sharing one softmax.

Shape letters: B rows, T tokens, C hidden width, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.mixers.gdn import GatedDeltaNet
from ltconvert.convert.mixers.rope import rotated
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError
from ltconvert.kernels.window_attention import window_attention

NOTHING = -40.0  # log of a weight that vanishes in fp32 beside any window's


class WindowedGatedDeltaNet(GatedDeltaNet):
    """``o = p * softmax_window(q.k) v + (1 - p) * gdn``, ``p = sigmoid(log_sum - rest)``.

    Softmax attention splits exactly in this way into the tokens of a window and all before them:
    p is the share of the weights that falls into the window, ``log_sum`` the logarithm of the
    window's exponentiated scores and ``rest`` that of the others. Here the window stays as it is in
    the teacher (its q, k, v and positions), a Gated DeltaNet stands for the other tokens, and
    ``rest`` is a linear function of the input, so that a head may look past the window by how much
    its token asks for it; the weights of an attention sink, which lies outside, go there too.
    Where nothing lies outside the window, p is 1: sequences up to the window's length are the
    teacher's own, whatever is in the rest.

    Padding between real tokens counts as distance in the window, and what it pushes out is seen by
    the GDN alone once ``window`` real tokens have gone by.

    The GDN reads and writes as without a window; its cache and the window's lie side by side.
    """

    kind = "gdn_window"
    keeps_keys = uses_rope = True
    BESIDE = ("rest_proj",)

    def __init__(
        self, spec: TeacherSpec, layer: int, *, conv_size: int | None, window: int
    ) -> None:
        super().__init__(spec, layer, conv_size=conv_size)
        self.window = window
        own = spec.layer_windows[layer]
        self.closed = own is not None and own <= window
        self.rest_proj = nn.Linear(spec.hidden_size, self.num_heads)
        self.reset_parameters()

    def reset_projections(self) -> None:
        """Neutral start: outside weighs as much as one key with a score of 0.

        Nothing where the teacher's own window ends with this one.
        """
        super().reset_projections()
        if hasattr(self, "rest_proj"):  # the parent calls this before there is one
            nn.init.zeros_(self.rest_proj.weight)
            nn.init.constant_(self.rest_proj.bias, NOTHING if self.closed else 0.0)

    def inherit(self, teacher: dict[str, Tensor]) -> dict[str, Tensor]:
        """See ``LinearMixer``.

        Raises:
            UserError: the teacher has an output gate; the one here is the recurrence's alone.
        """
        if "gate_proj.weight" in teacher and "rest_proj.weight" not in teacher:
            raise UserError(
                "the teacher's layers have output gates (student.sdpa_gate), for which gdn_window "
                "mixers have no place; use gdn mixers, or the model that it was made from"
            )
        return super().inherit(teacher)

    def mixed(
        self,
        projected: Sequence[Tensor],
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin | None,
    ) -> Tensor:
        """See ``LinearMixer``."""
        *projected, rest_BTH = projected
        linear_BTHD = self.mix(projected, context, cache_layer)
        linear_BTHD = linear_BTHD.unflatten(-1, (self.num_heads, self.head_dim))
        local_BTHD, log_sum_BTH = self._look_around(projected, context, cache_layer)
        share_BTH = torch.sigmoid(log_sum_BTH - rest_BTH.to(log_sum_BTH.dtype))
        outside_BT = context.positions_BT >= self.window
        share_BTH1 = share_BTH.where(outside_BT[..., None], 1.0)[..., None]
        o_BTHD = share_BTH1 * local_BTHD + (1.0 - share_BTH1) * linear_BTHD
        return o_BTHD.flatten(2)

    def take_in(
        self,
        kept: Sequence[Tensor],
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin,
    ) -> None:
        """Both parts: state and window."""
        super().take_in(kept[:-1], context, cache_layer)
        self._placed(kept, context, cache_layer)

    def _placed(
        self,
        projected: Sequence[Tensor],
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values with the cached ones [B, H, S, D]."""
        q_BHTD, k_BHSD, v_BHSD = (y.transpose(1, 2) for y in projected[:3])
        q_BHTD, k_BHSD = rotated(q_BHTD, k_BHSD, context.rope, self.rope_name)
        if cache_layer is not None:
            k_BHSD, v_BHSD = cast(CacheLayerMixin, cache_layer).update(k_BHSD, v_BHSD)
        return q_BHTD, k_BHSD, v_BHSD

    def _look_around(
        self,
        projected: Sequence[Tensor],
        context: SequenceContext,
        cache_layer: LinearAttentionCacheLayerMixin | None,
    ) -> tuple[Tensor, Tensor]:
        """The window's outputs [B, T, H, D] and the log of its summed weights [B, T, H]."""
        q_BHTD, k_BHSD, v_BHSD = self._placed(projected, context, cache_layer)
        keep_BS = context.keep_BS
        return window_attention(
            *(y.transpose(1, 2) for y in (q_BHTD, k_BHSD, v_BHSD)),
            window=self.window,
            scale=self.spec.attention_scale,
            soft_cap=self.spec.attention_softcap,
            bounds=context.bounds(),
            keep_BS=None if keep_BS is None else keep_BS[:, -k_BHSD.shape[2] :],
        )
