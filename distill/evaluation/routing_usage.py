"""What routing does with a pool: how many entries a depth uses, how many depths use an entry.

A Dreamer student (arXiv 2601.21582) runs one layer at D depths, and at every depth each token
chooses K of the E entries of a pool. A choice counts here as *use* of an entry at a depth when at
least ``LEAST_SHARE`` of that depth's tokens make it: over enough text everything is chosen once.

Nulls, which stand in for entries that left the pool, are no entries: what they take of the weights
is counted by itself.

D depths, N tokens, K choices, E entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEAST_SHARE = 0.01  # of a depth's tokens
REUSED_DEPTHS = 7  # what the paper calls much reuse


@dataclass
class Usage:
    """Choices added up, fp64 on the CPU.

    Attributes:
        chosen_DE: how many tokens chose an entry at a depth.
        effect_DE: what it did for them, summed: its routing weight beside other entries, times what
            the branch added to the token's stream, as a share of the stream's length.
        null_D: what nulls had of the tokens' weights, summed over tokens of 1 each.
        tokens: how many tokens there were at each depth.
    """

    chosen_DE: Tensor
    effect_DE: Tensor
    null_D: Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, depths: int, entries: int) -> Usage:
        """Nothing counted yet."""
        zeros = torch.zeros(depths, entries, dtype=torch.float64)
        return cls(zeros, zeros.clone(), zeros[:, 0].clone())

    def add(self, depth: int, ids_NK: Tensor, weights_NK: Tensor, adds_N: Tensor) -> None:
        """Count the choices of some tokens at one depth; the first depth counts the tokens.

        Args:
            ids_NK: entries, and from E on nulls.
            weights_NK: of routing.
            adds_N: what the branch added to each token's stream, as a share of its length.
        """
        entries = self.chosen_DE.shape[1]
        ids, weights = ids_NK.cpu(), weights_NK.detach().double().cpu()
        is_null, total_N1 = ids >= entries, weights.sum(-1, keepdim=True)
        self.null_D[depth] += (weights * is_null / total_N1).sum()
        weights = weights.masked_fill(is_null, 0.0)
        shares = weights * (total_N1 / weights.sum(-1, keepdim=True).clamp(min=1e-12))
        effects, real = shares * adds_N.cpu()[:, None], ~is_null
        self.chosen_DE[depth] += torch.bincount(ids[real], minlength=entries)
        self.effect_DE[depth] += torch.bincount(ids[real], effects[real], minlength=entries)
        self.tokens += len(ids_NK) if depth == 0 else 0

    @property
    def used_DE(self) -> Tensor:
        """Which entries a depth uses, bool."""
        return self.chosen_DE >= max(LEAST_SHARE * self.tokens, 1)

    def distinct_D(self) -> list[int]:
        """Entries that each depth uses."""
        return self.used_DE.sum(1).tolist()

    def effective_D(self) -> list[float]:
        """As many equally frequent entries would be as diverse: exp of the choices' entropy."""
        share_DE = self.chosen_DE / self.chosen_DE.sum(1, keepdim=True).clamp(min=1)
        return torch.special.entr(share_DE).sum(1).exp().tolist()

    def depths_E(self) -> list[int]:
        """Depths that use each entry."""
        return self.used_DE.sum(0).tolist()

    def reused_share(self, depths: int = REUSED_DEPTHS) -> float:
        """Share of all entries that at least so many depths use."""
        return float((self.used_DE.sum(0) >= depths).double().mean())

    def imbalance(self) -> float:
        """The most chosen entry's choices over the mean entry's, all depths together; 1 at best."""
        load_E = self.chosen_DE.sum(0)
        return float(load_E.max() / load_E.mean().clamp(min=1e-12))

    def to_dict(self) -> dict[str, Any]:
        """Everything above as plain values, and the share of tokens by depth and entry."""
        return {
            "tokens": self.tokens,
            "entries": self.chosen_DE.shape[1],
            "distinct": self.distinct_D(),
            "effective": self.effective_D(),
            "depths": self.depths_E(),
            "reused_share": self.reused_share(),
            "reused_depths": REUSED_DEPTHS,
            "least_share": LEAST_SHARE,
            "imbalance": self.imbalance(),
            "load": (self.chosen_DE / max(self.tokens, 1)).tolist(),
            "null": (self.null_D / max(self.tokens, 1)).tolist(),
        }
