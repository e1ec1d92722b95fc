"""How much of a model each layer is worth: the KL that leaving it out costs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ltconvert.convert.dropping import Skipped
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.selection.compare import kl_sums
from ltconvert.distill.selection.probe import read_batch
from ltconvert.distill.selection.walk import Walk, first_slots, walk


@torch.no_grad()
def damage(model: LT2ForCausalLM, batches: Iterable[Batch]) -> list[float]:
    """KL, in nats a token, of the model without each physical layer (in all loops) to the model.

    A pass sets out at the layer that is left out, so that a batch costs half a pass a layer.
    """
    sums = [0.0] * len(model.model.layers)
    tokens = 0
    for batch in batches:
        whole = walk(model, read_batch(batch, model.device))
        for layer in range(len(sums)):
            (kl,) = kl_sums(model, [_without(whole, layer)], model, whole.hidden_NC)
            sums[layer] += kl
        tokens += len(whole.hidden_NC)
    return [kl / max(tokens, 1) for kl in sums]


def least_damage(model: LT2ForCausalLM, batches: Iterable[Batch], count: int) -> list[int]:
    """The ``count`` layers whose loss alone costs least, sorted; of equal ones the earlier."""
    scores = damage(model, batches)
    return sorted(sorted(range(len(scores)), key=lambda layer: scores[layer])[:count])


def _without(whole: Walk, layer: int) -> torch.Tensor:
    """What the head reads at the wanted tokens, [N, C]."""
    inner = whole.model.model
    kept, inner.layers[layer] = inner.layers[layer], Skipped()
    try:
        slot = first_slots(whole.model)[layer]
        state = inner.run(whole.states[layer], whole.context, first_slot=slot)
    finally:
        inner.layers[layer] = kept
    return state.h_BTC[whole.inputs.at_BT]
