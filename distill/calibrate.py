"""What a mixer can be given before any training, from what the teacher's attention does.

B rows, T tokens, C hidden width, H heads, D head width, M = H D, n sampled queries of a row,
N sampled tokens in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ltconvert.convert.mixers import Projections, SequenceContext
from ltconvert.convert.mixers.attention import Attention
from ltconvert.convert.mixers.gdn_window import WindowedGatedDeltaNet
from ltconvert.convert.mixers.linear import LinearMixer
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.decays import Reach
from ltconvert.distill.losses import kept_squares


@torch.no_grad()
def run_teacher(teacher: LT2ForCausalLM, batch: Batch, end_slot: int) -> None:
    """Run the first ``end_slot`` visits of the teacher, for its hooks alone."""
    model = teacher.model
    h_BTC = model.embed(batch.input_ids_BT)
    context = model.context(h_BTC, attention_mask=batch.mask_BT, segment_ids=batch.segment_ids_BT)
    model.run(model.start(h_BTC), context, last_slot=end_slot)


@torch.no_grad()
def calibrate(
    teacher: LT2ForCausalLM,
    student: LT2ForCausalLM,
    batches: Sequence[Batch],
    layers: Sequence[int],
) -> None:
    """Start mixers at the size of the teacher's heads, over all kept tokens and loops.

    A linear mixer normalises every head before the output projection, so that at its start a head
    that hardly speaks in the teacher would shout. The norm's weight, channel by channel, becomes
    the root mean square of the teacher's attention output before the output projection. One that
    decays forgets as fast as the teacher's heads look back (`decays.Reach`). A `gdn_window` mixer
    takes the size of the teacher's attention to what lies outside the window, and the best linear
    guess of how much weight lies there. Others stay as they are.
    """
    gauges: list[HeadSizes | Outside | Reach] = []
    for layer in layers:
        mixer, source = student.model.layers[layer].mixer, teacher.model.layers[layer].mixer
        if isinstance(mixer, WindowedGatedDeltaNet):
            gauges.append(Outside(source, mixer))
        elif isinstance(mixer, LinearMixer):
            gauges.append(HeadSizes(source, mixer))
            if mixer.decays:
                gauges.append(Reach(source, mixer))
    with ExitStack() as stack:
        for gauge in gauges:
            stack.callback(gauge.listen().remove)
        for batch in batches:
            for gauge in gauges:
                gauge.keep_BT = batch.keep_BT
            run_teacher(teacher, batch, len(teacher.model.schedule))
    for gauge in gauges:
        gauge.apply()


class HeadSizes:
    """Root mean square of attention outputs by channel."""

    keep_BT: Tensor

    def __init__(self, source: Projections, mixer: LinearMixer) -> None:
        self.source, self.mixer = source, mixer
        self.squares = torch.zeros_like(mixer.out_norm_weight, dtype=torch.float64)
        self.count = 0

    def listen(self) -> RemovableHandle:
        """Take in every visit of the teacher's mixer until the handle is removed."""
        return self.source.o_proj.register_forward_pre_hook(lambda _, inputs: self._add(inputs[0]))

    def _add(self, o_BTM: Tensor) -> None:
        self.squares += kept_squares(o_BTM, self.keep_BT).view_as(self.squares)
        self.count += int(self.keep_BT.sum())

    def apply(self) -> None:
        """Set the mixer's weight."""
        self.mixer.out_norm_weight.copy_((self.squares / max(self.count, 1)).sqrt())


class Outside:
    """What the teacher's attention finds before the window, at some of the tokens.

    The log of the summed weights there is fitted by least squares on the mixer's input, with a
    ridge of ``RIDGE`` times the mean square of an input channel.
    """

    QUERIES = 128  # sampled a row and visit
    RIDGE = 1e-2
    keep_BT: Tensor

    def __init__(self, source: Attention, mixer: WindowedGatedDeltaNet) -> None:
        self.source, self.mixer = source, mixer
        self.squares = torch.zeros_like(mixer.out_norm_weight, dtype=torch.float64)
        width = mixer.rest_proj.in_features + 1 + mixer.num_heads
        # Sums of products of all pairs among (input, 1, log of summed weights).
        self.products = self.squares.new_zeros(width, width)
        self.count = 0

    def listen(self) -> RemovableHandle:
        """Take in every visit of the teacher's mixer until the handle is removed."""
        return self.source.register_forward_pre_hook(lambda _, inputs: self._add(*inputs[:2]))

    def _add(self, x_BTC: Tensor, context: SequenceContext) -> None:
        length, window = x_BTC.shape[1], self.mixer.window
        step = max(1, -(-(length - window) // self.QUERIES))
        at_n = torch.arange(window, max(length, window), step, device=x_BTC.device)
        if len(at_n) == 0 or self.mixer.closed:
            return
        scores_BHnT, v_BHTD = self.source.scores(x_BTC, context, at_n)
        seen_BnT = self._outside(context, at_n)
        scores_BHnT = scores_BHnT.masked_fill(~seen_BnT[:, None], float("-inf"))
        log_sum_BnH = scores_BHnT.logsumexp(-1).transpose(1, 2)
        o_BnHD = (scores_BHnT.softmax(-1).to(v_BHTD.dtype) @ v_BHTD).transpose(1, 2)
        used_Bn = seen_BnT.any(-1) & self.keep_BT[:, at_n]
        x_NC, log_sum_NH = x_BTC[:, at_n][used_Bn].double(), log_sum_BnH[used_Bn].double()
        rows = torch.cat([x_NC, torch.ones_like(x_NC[:, :1]), log_sum_NH], -1)
        self.products += rows.mT @ rows
        self.squares += o_BnHD[used_Bn].double().square().sum(0)
        self.count += len(rows)

    def _outside(self, context: SequenceContext, at_n: Tensor) -> Tensor:
        """Which keys the teacher sees behind the window, [B, n, T]."""
        behind_nT = at_n[:, None] - torch.arange(context.num_tokens, device=at_n.device)
        seen_BnT = (behind_nT >= self.mixer.window) & self.keep_BT[:, None]
        if self.source.window is not None:
            seen_BnT = seen_BnT & (behind_nT < self.source.window)
        if (ids_BT := context.segment_ids_BT) is not None:
            seen_BnT = seen_BnT & (ids_BT[:, at_n, None] == ids_BT[:, None])
        return seen_BnT

    def apply(self) -> None:
        """Set the mixer's weights; nothing where no token had anything outside."""
        if self.count == 0:
            return
        rest = self.mixer.rest_proj
        width = rest.in_features
        known, wanted = self.products[: width + 1, : width + 1], self.products[: width + 1]
        ridge = self.RIDGE * known.diagonal()[:width].mean()
        penalty = torch.full_like(known[0], float(ridge))
        penalty[width] = 0.0  # the bias is free
        solved = torch.linalg.solve(known + penalty.diag(), wanted[:, width + 1 :])
        rest.weight.copy_(solved[:width].mT)
        rest.bias.copy_(solved[width])
        self.mixer.out_norm_weight.copy_((self.squares / self.count).sqrt())
