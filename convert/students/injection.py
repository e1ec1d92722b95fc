"""How the core of a recurrent-depth model begins and reads its input (arXiv 2502.05171, Huginn).

B rows, T tokens, C hidden width, P positions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from ltconvert.convert.students.loop import LoopState, Step
from ltconvert.convert.teachers.spec import TeacherSpec

SEED = 0  # of the first state
DEVIATIONS = 3.0  # where it is cut off


class Injection(nn.Module):
    """``state = W [state, e]`` at the start of every loop, e what the prelude gives (section 3.2).

    The state before the first loop is random: normal, cut off at three deviations, times the
    embedding scale. As published it is drawn anew in each call; here it is a function of the
    token's position, drawn once from ``SEED``, so that cached, padded and packed passes agree and a
    student sees what its teacher saw. Behind ``max_position_embeddings`` the draws repeat.
    """

    def __init__(self, spec: TeacherSpec) -> None:
        super().__init__()
        assert spec.initial_state_std is not None
        self.std, self.scale = spec.initial_state_std, spec.embedding_scale
        self.num_positions = spec.max_position_embeddings
        self.adapter = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=False)
        self._table_PC: Tensor | None = None

    def forward(self, state: Tensor, prelude: Tensor) -> Tensor:
        """[..., C] and [..., C] -> [..., C]."""
        return self.adapter(torch.cat([state, prelude], dim=-1))

    def first(self, like: Tensor, positions: Tensor) -> Tensor:
        """The state before the first loop, [..., C], for integer positions [...]."""
        table_PC = self._table_PC
        if table_PC is None or table_PC.device != like.device or table_PC.dtype != like.dtype:
            with torch.inference_mode(False):  # it is used in training, too
                table_PC = self._table_PC = self._draw(like.shape[-1]).to(like)
        return table_PC[positions % self.num_positions]

    def enter(self, step: Step, state: LoopState, positions_BT: Tensor) -> LoopState:
        """Open a loop."""
        if step.loop == 0:
            first_BTC = self.first(state.h_BTC, positions_BT).expand_as(state.h_BTC)
            state = replace(state, h_BTC=first_BTC, prelude_BTC=state.h_BTC)
        assert state.prelude_BTC is not None
        return state.with_stream(self(state.h_BTC, state.prelude_BTC))

    def _draw(self, width: int) -> Tensor:
        """The states of all positions on the CPU, the same on every machine, [P, C].

        By the inverse of the distribution: what PyTorch's own truncated normal draws from a seed
        differs from version to version.
        """
        generator = torch.Generator().manual_seed(SEED)
        size = (self.num_positions, width)
        share_PC = torch.rand(size, dtype=torch.float64, device="cpu", generator=generator)
        inside = math.erf(DEVIATIONS / math.sqrt(2))  # the normal distribution's share that is left
        deviations_PC = math.sqrt(2) * torch.erfinv(inside * (2 * share_PC - 1))
        return deviations_PC.float() * (self.std * self.scale)
