"""What a mixer can be given before any training: the size of the teacher's own heads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
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
    """Start output norms at the size of the teacher's heads.

    A `gdn` mixer normalises every head before the output projection, so that at its start a head
    that hardly speaks in the teacher would shout. The norm's weight, channel by channel, becomes
    the root mean square of the teacher's attention output before the output projection, over all
    kept tokens and loops. Mixers without such a norm stay as they are.
    """
    wanted = [i for i in layers if hasattr(student.model.layers[i].mixer, "out_norm_weight")]
    squares: dict[int, Tensor] = {}
    counts = dict.fromkeys(wanted, 0)
    with ExitStack() as stack:
        for layer in wanted:

            def hook(module: nn.Module, inputs: tuple[Any, ...], layer: int = layer) -> None:
                squares[layer] = squares.get(layer, 0.0) + kept_squares(inputs[0], batch.keep_BT)
                counts[layer] += int(batch.keep_BT.sum())

            handle = teacher.model.layers[layer].mixer.o_proj.register_forward_pre_hook(hook)
            stack.callback(handle.remove)
        for batch in batches:
            run_teacher(teacher, batch, len(teacher.model.schedule))
    for layer in wanted:
        weight = student.model.layers[layer].mixer.out_norm_weight
        rms = (squares[layer] / max(counts[layer], 1)).sqrt()
        weight.copy_(rms.view_as(weight))
