"""The order in which a looped model visits its layers; a dense model is the case of one loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ltconvert.convert.students.depth_stream import DepthStream
    from ltconvert.convert.students.dreamer.layer import DreamerPass


@dataclass(frozen=True)
class Step:
    """One visit of a physical layer.

    Attributes:
        slot: index of the visit in execution order, and of its cache layer.
        layer: the physical layer.
        loop: which pass of the core; 0 in the prelude, ``loops - 1`` in the coda.
        opens_loop, closes_loop: the visit is the first or last of its pass of the core.
    """

    slot: int
    layer: int
    loop: int
    opens_loop: bool
    closes_loop: bool


@dataclass(frozen=True)
class LoopState:
    """All that passes from one visit to the next; a run can go on from any saved state.

    Attributes:
        h_BTC: the residual stream.
        loop_in_BTC: the residual stream at the start of the current loop (for the loop residual).
        prelude_BTC: the prelude's output, where every loop reads it.
        loop_states: the normed stream [B, T, C] after each finished loop.
        depth: what sublayers left at each token; one for all states of a pass, so that of these
            the newest alone can be gone on from. None: layers that would read it do not.
        dreamer: the same of a Dreamer, with what it makes of its pools for one pass.
        hidden_states: the stream before the first visit and behind every one, where they are asked
            for.
        choice_losses: of the visits that gave one, see ``Projections.forward_with_loss``.
    """

    h_BTC: Tensor
    loop_in_BTC: Tensor
    prelude_BTC: Tensor | None = None
    loop_states: tuple[Tensor, ...] = ()
    hidden_states: tuple[Tensor, ...] | None = None
    choice_losses: tuple[Tensor, ...] = ()
    depth: DepthStream | None = None
    dreamer: DreamerPass | None = None

    def with_stream(self, h_BTC: Tensor) -> LoopState:
        """The same state with another residual stream."""
        return replace(self, h_BTC=h_BTC)


def at_depth(steps: tuple[Step, ...], depths: int) -> tuple[Step, ...]:
    """The first ``depths`` visits, or more of the last; an end before the coda closes a loop."""
    last, core_end = steps[-1], max(step.slot for step in steps if step.closes_loop)
    more = (
        replace(last, slot=slot, opens_loop=False, closes_loop=False)
        for slot in range(len(steps), depths)
    )
    found = [*steps[:depths], *more]
    in_coda = not last.closes_loop and len(found) > core_end + 1
    return (*found[:-1], replace(found[-1], closes_loop=not in_coda))


def make_schedule(
    num_layers: int, num_loops: int, prelude: int = 0, coda: int = 0
) -> tuple[Step, ...]:
    """Prelude once, core ``num_loops`` times, coda once.

    Raises:
        ValueError: prelude and coda leave no core, or there is no loop.
    """
    core = num_layers - prelude - coda
    if core < 1 or num_loops < 1:
        raise ValueError(
            f"{prelude} prelude and {coda} coda layers of {num_layers} leave {core} to loop "
            f"{num_loops} times; at least one layer and one loop are needed"
        )
    visits = [(layer, 0, False, False) for layer in range(prelude)]
    for loop in range(num_loops):
        for layer in range(prelude, prelude + core):
            visits.append((layer, loop, layer == prelude, layer == prelude + core - 1))
    visits += [(layer, num_loops - 1, False, False) for layer in range(prelude + core, num_layers)]
    return tuple(Step(slot, *visit) for slot, visit in enumerate(visits))
