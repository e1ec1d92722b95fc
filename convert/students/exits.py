"""Leaving the loops early: what an exit gate says, and a decoded token that acts on it.

A loop that is left leaves holes in the caches of those behind it, which a later token that goes
deeper would look into. They are filled with what the token's last loop made: the mixer of a skipped
visit takes in what the same layer read in the last loop that was computed, without reading its
cache or giving anything. For softmax attention these are that loop's keys and values again (the
last loop's are those that Ouro's paper, arXiv 2510.25741, finds it can best reuse); for a
recurrence the same update, of the skipped loop's own state.

B rows, T tokens, C hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ltconvert.errors import UserError

if TYPE_CHECKING:
    from ltconvert.convert.mixers import SequenceContext
    from ltconvert.convert.students.cache import LoopCache
    from ltconvert.convert.students.loop import LoopState
    from ltconvert.convert.students.lt2_model import LT2Model


def exit_probabilities(exit_logits_BTL: Tensor) -> Tensor:
    """Probability of leaving after each loop, [B, T, loops], summing to 1.

    ``p_t = sigmoid(g_t) prod_{j<t} (1 - sigmoid(g_j))``; the last loop takes what remains, its own
    gate value unused (Ouro).
    """
    stay_log = F.logsigmoid(-exit_logits_BTL[..., :-1].float()).cumsum(-1)
    before_log = F.pad(stay_log, (1, 0))
    leave_log = F.logsigmoid(exit_logits_BTL[..., :-1].float())
    return torch.cat([leave_log + before_log[..., :-1], before_log[..., -1:]], dim=-1).exp()


class Leaving:
    """Whether all rows of one token have reached the threshold; a new one for every token.

    Args:
        gate: Linear(C, 1).
        threshold: of the summed exit probability, below 1.
    """

    def __init__(self, gate: nn.Linear, threshold: float) -> None:
        self.gate, self.threshold = gate, threshold
        self._stay_log: Tensor | float = 0.0

    def after(self, normed: Tensor) -> bool:
        """Count in one more loop by its normed stream [..., C]; the host waits for the answer."""
        self._stay_log = self._stay_log + F.logsigmoid(-self.gate(normed).float())
        return bool((-torch.expm1(self._stay_log) >= self.threshold).all())


def leaving(model: LT2Model, threshold: float | None) -> Leaving | None:
    """What decides when a token's loops end; None where all are always computed.

    A threshold of 1 means that, too, though a rounded sum of probabilities could reach it.

    Raises:
        UserError: not in [0, 1], the model has no exit gate, or layers behind the loops read what
            skipped visits would have left in a depth stream.
    """
    if threshold is None:
        return None
    if not 0.0 <= threshold <= 1.0:
        raise UserError(f"exit_threshold is {threshold}; give a probability, from 0 to 1 (never)")
    if threshold == 1.0:
        return None
    if model.dreamer is not None:
        raise UserError(
            f"exit_threshold is {threshold}, but a Dreamer runs all depths; leave it out"
        )
    if model.exit_gate is None:
        raise UserError(
            f"exit_threshold is {threshold}, but a {model.spec.family} model has no exit gate; "
            "leave it out"
        )
    if _read_behind_loops(model):
        raise UserError(
            f"exit_threshold is {threshold}, but layers behind the loops read what every loop "
            "leaves at a token (moda); leave it out, or convert with student.coda_layers=0"
        )
    return Leaving(model.exit_gate, threshold)


def _read_behind_loops(model: LT2Model) -> bool:
    if model.depth_plan is None:
        return False
    visits = zip(model.schedule, model.depth_plan.visits, strict=True)
    return any(depth.reads and step.layer >= core_layers(model).stop for step, depth in visits)


def core_layers(model: LT2Model) -> range:
    """The physical layers that loop."""
    config = model.config
    return range(config.prelude_layers, config.num_layers - config.coda_layers)


def run_until_exit(
    model: LT2Model,
    state: LoopState,
    context: SequenceContext,
    cache: LoopCache,
    leaves: Leaving,
) -> LoopState:
    """One token [B, 1, C] behind a cache, through as many loops as the exit gate wants.

    As ``LT2Model.run``, but for the loops after the one in which ``leaves`` says so, for all rows
    at once: of those, caches are filled (see the module's text) and nothing else is computed.
    """
    context.kept, left, core = {}, False, core_layers(model)
    last_loop = model.spec.num_loops - 1
    for step in model.schedule:
        if left and step.layer in core:
            mixer = model.layers[step.layer].mixer
            mixer.take_in(context.kept[mixer], context, cache.layers[step.slot])
            continue
        state = model.visit(step, state, context, cache)
        if step.closes_loop and step.loop < last_loop:
            left = leaves.after(state.loop_states[-1])
    cache.count_loops(len(state.loop_states))
    return model.finish(state)
