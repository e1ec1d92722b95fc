"""How far back a teacher's heads look, as half-lives that a decaying mixer can start from.

B rows, T tokens, H heads, n sampled queries of a row, G half-lives to choose from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from ltconvert.convert.mixers import SequenceContext
from ltconvert.convert.mixers.attention import Attention
from ltconvert.convert.mixers.linear import LinearMixer, spread_half_lives

SHORTEST, LONGEST, CHOICES = 1.0, 2048.0, 64


class Reach:
    """The half-life of every head: half of its attention lies as near as half of that decay does.

    Attention to the first token of a document is left out: heads that have nothing to say put it
    there (an attention sink), and no decay could follow it. Rows are finite, so a head that looks
    at all tokens alike is as short-sighted as its rows are short; medians are therefore compared
    with those of exponential decays over the same queries and keys, not read as half-lives.
    """

    QUERIES = 64  # sampled a row and visit
    keep_BT: Tensor

    def __init__(self, source: Attention, mixer: LinearMixer) -> None:
        self.source, self.mixer = source, mixer
        device = mixer.out_norm_weight.device
        # Weight that a head puts so many tokens back, and by the keys that its queries see: column
        # d stands for a distance d, and for d + 1 keys.
        self.by_distance_HT = torch.zeros(mixer.num_heads, 0, dtype=torch.float64, device=device)
        self.by_keys_HT = torch.zeros_like(self.by_distance_HT)

    def listen(self) -> RemovableHandle:
        """Take in every visit of the teacher's mixer until the handle is removed."""
        return self.source.register_forward_pre_hook(lambda _, inputs: self._add(*inputs[:2]))

    def _add(self, x_BTC: Tensor, context: SequenceContext) -> None:
        length = x_BTC.shape[1]
        if (more := length - self.by_keys_HT.shape[1]) > 0:
            self.by_distance_HT = F.pad(self.by_distance_HT, (0, more))
            self.by_keys_HT = F.pad(self.by_keys_HT, (0, more))
        at_n = torch.arange(1, length, max(1, -(-length // self.QUERIES)), device=x_BTC.device)
        scores_BHnT, _ = self.source.scores(x_BTC, context, at_n)
        behind_nT = at_n[:, None] - torch.arange(length, device=x_BTC.device)
        seen_BnT = self._seen(context, at_n, behind_nT)
        weights_BHnT = scores_BHnT.masked_fill(~seen_BnT[:, None], float("-inf")).softmax(-1)
        others_BnT = seen_BnT & (context.positions_BT > 0)[:, None] & self.keep_BT[:, at_n, None]
        weights_BHnT = weights_BHnT.where(others_BnT[:, None], 0.0)
        # Column d of the result is the key d tokens back.
        column_nT = behind_nT.clamp(min=0).expand_as(weights_BHnT)
        back_BHnT = weights_BHnT.gather(-1, column_nT).where(behind_nT >= 0, 0.0)
        self.by_distance_HT[:, :length] += back_BHnT.sum((0, 2), dtype=torch.float64)
        keys_Bn = others_BnT.sum(-1).clamp(min=1)  # no weight where there are none
        chosen_NT = F.one_hot(keys_Bn.flatten() - 1, length).double()
        said_HN = weights_BHnT.sum(-1, dtype=torch.float64).transpose(0, 1).flatten(1)
        self.by_keys_HT[:, :length] += said_HN @ chosen_NT

    def _seen(self, context: SequenceContext, at_n: Tensor, behind_nT: Tensor) -> Tensor:
        """Which keys the teacher's queries see, [B, n, T]; themselves always."""
        seen_BnT = (behind_nT >= 0) & self.keep_BT[:, None]
        if self.source.window is not None:
            seen_BnT = seen_BnT & (behind_nT < self.source.window)
        if (ids_BT := context.segment_ids_BT) is not None:
            seen_BnT = seen_BnT & (ids_BT[:, at_n, None] == ids_BT[:, None])
        return seen_BnT | (behind_nT == 0)

    def half_lives(self) -> Tensor:
        """Of the heads, in tokens, between SHORTEST and LONGEST, [H] in fp64."""
        choices_G = spread_half_lives(CHOICES, SHORTEST, LONGEST).to(self.by_keys_HT)
        rates_G1 = math.log(2.0) / choices_G[:, None]
        distance_T = torch.arange(self.by_keys_HT.shape[1], device=choices_G.device)
        # A query with N keys spreads what it has over them as exp(-rate d) (1 - exp(-rate)) /
        # (1 - exp(-rate N)); at distance d those with more than d keys count.
        whole_GT = -1 / torch.expm1(-rates_G1 * (distance_T + 1))
        spread_HGT = self.by_keys_HT[:, None] * whole_GT
        decayed_HGT = spread_HGT.flip(-1).cumsum(-1).flip(-1) * torch.exp(-rates_G1 * distance_T)
        apart_HG = _median(self.by_distance_HT)[:, None] - _median(decayed_HGT)
        return choices_G[apart_HG.abs().argmin(-1)]

    def apply(self) -> None:
        """Set the mixer's decays; nothing where no query saw anything but first tokens."""
        if self.by_keys_HT.sum() > 0:
            self.mixer.set_half_lives(self.half_lives())


def _median(mass_T: Tensor) -> Tensor:
    """Distance within which half of the mass [..., T] lies, [...], between tokens by a line."""
    below_T = mass_T.cumsum(-1)
    half_1 = below_T[..., -1:] / 2
    at_1 = (below_T < half_1).sum(-1, keepdim=True).clamp(max=mass_T.shape[-1] - 1)
    over_1 = below_T.gather(-1, at_1) - half_1
    return (at_1 + 1 - over_1 / mass_T.gather(-1, at_1).clamp_min(1e-300))[..., 0]
