"""Forward passes cut open at the layers, so that what lies before a changed layer is computed once.

Shape letters: B rows, T tokens, C hidden width, N scored tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ltconvert.convert.mixers import SequenceContext
from ltconvert.convert.students.loop import LoopState
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import swapped


@dataclass(frozen=True)
class Inputs:
    """What a model reads in one pass.

    Attributes:
        input_ids_BT: token ids.
        keep_BT: False at padding; None: nothing is padding.
        segment_ids_BT: documents of packed rows; None when a row is one document.
        at_BT: the tokens whose hidden states are wanted, N of them.
    """

    input_ids_BT: Tensor
    keep_BT: Tensor | None
    segment_ids_BT: Tensor | None
    at_BT: Tensor

    @property
    def tokens(self) -> int:
        """Tokens that the pass reads, padding included."""
        return self.input_ids_BT.numel()


@dataclass(frozen=True)
class Walk:
    """One whole forward pass and the states that others can set out from.

    Attributes:
        states: the state before the first visit of each physical layer.
        hidden_NC: what the head reads at the wanted tokens.
        visits: layer visits that the pass took.
    """

    model: LT2ForCausalLM
    inputs: Inputs
    context: SequenceContext
    states: tuple[LoopState, ...]
    hidden_NC: Tensor
    visits: int


def first_slots(model: LT2ForCausalLM) -> list[int]:
    """The slot of each physical layer's first visit; later ones follow in the loops to come."""
    first: dict[int, int] = {}
    for step in model.model.schedule:
        first.setdefault(step.layer, step.slot)
    return [first[layer] for layer in range(len(model.model.layers))]


@torch.no_grad()
def walk(model: LT2ForCausalLM, inputs: Inputs) -> Walk:
    """One whole pass, stopping before each layer's first visit to keep the state."""
    inner = model.model
    h_BTC = inner.embed(inputs.input_ids_BT)
    context = inner.context(h_BTC, attention_mask=inputs.keep_BT, segment_ids=inputs.segment_ids_BT)
    state, slot = inner.start(h_BTC), 0
    states: list[LoopState] = []
    for stop in first_slots(model):  # ascending: prelude, core and coda keep the layers' order
        if stop > slot:
            state, slot = inner.run(state, context, first_slot=slot, last_slot=stop), stop
        states.append(state)
    state = inner.run(state, context, first_slot=slot)
    hidden_NC = state.h_BTC[inputs.at_BT]
    return Walk(model, inputs, context, tuple(states), hidden_NC, len(inner.schedule))


@torch.no_grad()
def with_mixer(base: Walk, layer: int, mixer: nn.Module) -> tuple[Tensor, int]:
    """The pass of ``base`` with another mixer in one physical layer (in all its loops).

    Returns:
        What the head reads at the wanted tokens [N, C], and the layer visits that it took: those
        from the layer's first visit to the end.
    """
    slot = first_slots(base.model)[layer]
    with swapped(base.model, layer, fitting(mixer, base.model)):
        state = base.model.model.run(base.states[layer], base.context, first_slot=slot)
    return state.h_BTC[base.inputs.at_BT], len(base.model.model.schedule) - slot


def fitting(mixer: nn.Module, model: LT2ForCausalLM) -> nn.Module:
    """The mixer in the dtype of ``model``; itself where autocast sees to that."""
    dtype = model.dtype
    cast_anyway = torch.is_autocast_enabled(model.device.type)
    if cast_anyway or all(p.dtype == dtype for p in mixer.parameters()):
        return mixer
    return copy.deepcopy(mixer).to(dtype)
