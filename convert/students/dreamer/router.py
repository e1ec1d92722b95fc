"""Which experts a token uses at a depth.

N tokens, C hidden width, E experts, Z nulls, X = E + Z, K chosen ones, D depths.
"""

from __future__ import annotations

import math
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
        chosen_NK: experts; from E on nulls.
        weights_NK: by which their outputs are added up.
        top_N: the highest sigmoid among them, nulls too, not normalised.
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

    Behind the experts there may be nulls, which are chosen like them and give nothing (the zero
    experts of MoE++, arXiv 2410.07348): what their weights take, the branch does not add. Nobody
    balances them.

    Attributes:
        keys, depth_logits: k [X, C] and p [D, X], of experts and then of nulls.
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
        nulls: int = 0,
    ) -> None:
        super().__init__()
        self.layers, self.slices, self.top, self.select_by = list(layers), slices, top, select_by
        self.keys = nn.Parameter(torch.zeros(experts + nulls, width))
        self.depth_logits = nn.Parameter(torch.zeros(len(layers), experts + nulls))
        self.register_buffer("balance", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """No bias, no say of the token, a preference for each depth's own experts."""
        for value in (self.keys, self.balance, self.load):
            nn.init.zeros_(value)
        start = torch.tensor(start_logits(self.layers, self.experts, self.slices))
        self.depth_logits.copy_(F.pad(start, (0, self.nulls), value=OTHER))

    @property
    def experts(self) -> int:
        """E."""
        return len(self.balance)

    @property
    def nulls(self) -> int:
        """Z."""
        return len(self.keys) - len(self.balance)

    def forward(self, h_NC: Tensor, depth: int) -> Routes:
        """Normalised hidden states [N, C] at a depth -> choices, in fp32 at least."""
        work = torch.promote_types(h_NC.dtype, torch.float32)
        with torch.autocast(h_NC.device.type, enabled=False):
            bias = self.depth_logits[depth].to(work)
            logits_NX = F.linear(h_NC.to(work), self.keys.to(work), bias)
        scores_NX = logits_NX.sigmoid()
        ranked_NX = logits_NX if self.select_by == "logits" else scores_NX
        chosen_NK = self._chosen(ranked_NX.detach())
        weights_NK = scores_NX.gather(-1, chosen_NK)
        norm_N1 = weights_NK.sum(-1, keepdim=True) / self.slices
        return Routes(chosen_NK, weights_NK / norm_N1, weights_NK.amax(-1))

    def nothing(self, tokens: int) -> Routes:
        """Of so many tokens that choose nulls alone."""
        nulls_K = torch.arange(self.top, device=self.keys.device) + self.experts
        shares_K = torch.full_like(nulls_K, self.slices / self.top, dtype=torch.float32)
        nulls_NK, shares_NK = (x.expand(tokens, -1) for x in (nulls_K, shares_K))
        return Routes(nulls_NK, shares_NK, torch.zeros_like(shares_NK[:, 0]))

    @torch.no_grad()
    def null_shares(self) -> Tensor:
        """What nulls have of the weights at each depth [D], as far as the depth alone decides."""
        silent_1C = torch.zeros_like(self.keys[:1])
        routes = [self(silent_1C, depth) for depth in range(len(self.depth_logits))]
        weights = [(r.weights_NK * (r.chosen_NK >= self.experts)).sum() for r in routes]
        return torch.stack(weights) / self.slices

    def _chosen(self, ranked_NX: Tensor) -> Tensor:
        """The K highest with bias [N, K]; nulls, and how many, are chosen as without any bias."""
        biased_NX = ranked_NX[:, : self.experts] + self.balance
        if self.nulls:
            least_N1 = ranked_NX.topk(self.top).values[:, -1:]
            taken_NZ = ranked_NX[:, self.experts :] >= least_N1
            first_NZ = torch.where(taken_NZ, math.inf, -math.inf)
            biased_NX = torch.cat([biased_NX, first_NZ], dim=-1)
        return biased_NX.topk(self.top).indices


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
