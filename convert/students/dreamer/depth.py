"""Depth attention: a token looks at itself at earlier depths (arXiv 2601.21582).

B rows, T tokens, N slots, C hidden width, H heads, D head width, F = D / 2 frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ltconvert.convert.mixers.attention import ZeroLinear
from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.convert.mixers.rope import apply_rope
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.kernels.depth_attention import DepthSlots, depth_only_attention

SLOWEST = 0.01  # radians a depth of the slowest channels; the fastest turn by 1

Slot = tuple[Tensor, Tensor]


class DepthAttention(nn.Module):
    """softmax over the keys that earlier depths of the same token wrote; gives 0 at the start.

    Depths are positions: the first half of the frequencies turns with the depth, the other half
    with the depths that are left, counted from ``depths``.

    Args:
        depths: how often the layer is applied.
        heads: H, as wide as the teacher's.
    """

    def __init__(self, spec: TeacherSpec, depths: int, heads: int) -> None:
        super().__init__()
        self.depths, self.head_dim = depths, spec.head_dim
        self._by_device: dict[torch.device, tuple[Tensor, Tensor]] = {}
        width = heads * spec.head_dim
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, spec.norm_offset)
        self.q_proj = nn.Linear(spec.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, width, bias=False)
        self.o_proj = ZeroLinear(width, spec.hidden_size, bias=False)

    def forward(
        self, h_BTC: Tensor, depth: int, slots: DepthSlots | None
    ) -> tuple[Tensor | None, Slot | None]:
        """(What it adds to the stream [B, T, C], the key and value [B, T, H, D] that it leaves).

        Nothing is added at the first depth, nothing left at the last.
        """
        x_BTC = self.norm(h_BTC)
        leaves = depth + 1 < self.depths
        left = (self.placed(self.k_proj, x_BTC, depth), self._heads(self.v_proj, x_BTC))
        if not depth:
            return None, left if leaves else None
        assert slots is not None
        o_BTHD, _ = depth_only_attention(
            self.placed(self.q_proj, x_BTC, depth),
            slots.keys_BTNGD,
            slots.values_BTNGD,
            slots=depth,
            scale=self.head_dim**-0.5,
            gradients=slots.gradients,
        )
        return self.o_proj(o_BTHD.flatten(2)), left if leaves else None

    def _heads(self, projection: nn.Module, x_BTC: Tensor) -> Tensor:
        heads_BTHD: Tensor = projection(x_BTC).unflatten(-1, (-1, self.head_dim))
        return heads_BTHD

    def placed(self, projection: nn.Module, x_BTC: Tensor, depth: int) -> Tensor:
        """Queries or keys at their depth."""
        x_BTHD = self._heads(projection, x_BTC)
        cos, sin = (table[depth : depth + 1][None] for table in self.tables(x_BTC.device))
        return apply_rope(x_BTHD.transpose(1, 2), cos, sin).transpose(1, 2)

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [depths, D], made once a device: copies to a GPU make the host wait."""
        if device not in self._by_device:
            with torch.inference_mode(False):
                turns = [depth_angles(i, self.depths, self.head_dim) for i in range(self.depths)]
                angles = torch.tensor(turns, device=device)
                self._by_device[device] = angles.cos(), angles.sin()
        return self._by_device[device]


def depth_angles(depth: int, depths: int, head_dim: int) -> list[float]:
    """Angles [D] at a depth: half of the frequencies from the first depth, half to the last."""
    forward = head_dim // 2 - head_dim // 4
    turns = [
        position * SLOWEST ** (i / count)
        for position, count in ((depth, forward), (depths - 1 - depth, head_dim // 4))
        for i in range(count)
    ]
    return turns * 2  # channel i turns with channel i + D / 2
