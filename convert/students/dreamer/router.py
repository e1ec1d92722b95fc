"""Which experts a token uses at a depth.

N tokens, C hidden width, E experts, K chosen ones, D depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ltconvert.convert.students.dreamer.config import SelectBy

# Logits at the start: a depth's own experts, others, and less for each depth that lies between.
OWN, OTHER, FARTHER = 2.0, -4.0, -0.25


@dataclass(frozen=True)
class Routes:
    """What tokens chose, in the order of their logits with bias.

    Attributes:
        chosen_NK: experts.
        weights_NK: by which their outputs are added up.
        top_N: the highest sigmoid among them, not normalised.
    """

    chosen_NK: Tensor
    weights_NK: Tensor
    top_N: Tensor

    def detach(self) -> Routes:
        """The same without gradient."""
        return Routes(self.chosen_NK, self.weights_NK.detach(), self.top_N.detach())


class Router(nn.Module):
    """``weights = norm(TopK(sigmoid(x), x + b, k))`` with logits ``x_e = k_e . h + p_de``.

    arXiv 2601.21582: keys k are learned, queries are the normalised hidden states h, depth is
    encoded; the bias b balances loads and enters the choice alone (as in DeepSeek-V3, arXiv
    2412.19437, where it is added to sigmoid(x): ``select_by="scores"``). Depth is encoded by a
    learned logit for each depth and expert.

    Keys start at 0 and ``p`` such that a depth prefers the experts that were its layer's: routing
    starts near the teacher even where nothing forces it.

    Attributes:
        balance: b [E], moved by training, not by gradients.
        load: how often each expert [E] was chosen since ``balance`` was last moved.

    Args:
        layers: for each depth the layer of the teacher that it stands for.
        slices: experts a layer.
    """

    balance: Tensor
    load: Tensor

    def __init__(
        self,
        width: int,
        experts: int,
        layers: Sequence[int],
        *,
        slices: int,
        top: int,
        select_by: SelectBy,
    ) -> None:
        super().__init__()
        self.layers, self.slices, self.top, self.select_by = list(layers), slices, top, select_by
        self.keys = nn.Parameter(torch.zeros(experts, width))
        self.depth_logits = nn.Parameter(torch.zeros(len(layers), experts))
        self.register_buffer("balance", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """No bias, no say of the token, a preference for each depth's own experts."""
        for value in (self.keys, self.balance, self.load):
            nn.init.zeros_(value)
        start = start_logits(self.layers, self.keys.shape[0], self.slices)
        self.depth_logits.copy_(torch.tensor(start))

    def forward(self, h_NC: Tensor, depth: int) -> Routes:
        """Normalised hidden states [N, C] at a depth -> choices, in fp32 at least."""
        work = torch.promote_types(h_NC.dtype, torch.float32)
        with torch.autocast(h_NC.device.type, enabled=False):
            bias = self.depth_logits[depth].to(work)
            logits_NE = F.linear(h_NC.to(work), self.keys.to(work), bias)
        scores_NE = logits_NE.sigmoid()
        ranked_by = logits_NE if self.select_by == "logits" else scores_NE
        chosen_NK = (ranked_by.detach() + self.balance).topk(self.top).indices
        weights_NK = scores_NE.gather(-1, chosen_NK)
        norm_N1 = weights_NK.sum(-1, keepdim=True) / self.slices
        return Routes(chosen_NK, weights_NK / norm_N1, weights_NK.amax(-1))


def start_logits(layers: Sequence[int], experts: int, slices: int) -> list[list[float]]:
    """For each depth the logit of each expert: the nearer its layer's own depths, the higher.

    Args:
        layers: for each depth the layer of the teacher that it stands for.
    """

    def logit(depth: int, expert: int) -> float:
        own = [d for d, layer in enumerate(layers) if layer == expert // slices]
        between = min((abs(depth - d) for d in own), default=len(layers))
        return OWN if between == 0 else OTHER + FARTHER * (between - 1)

    return [[logit(depth, expert) for expert in range(experts)] for depth in range(len(layers))]
