"""How much of a Dreamer each entry of its pools is worth: the KL that doing without it costs.

What an entry adds to the stream says little of it: the first layer's attention adds almost nothing
and is worth most. Doing without one means that tokens which would choose it choose the next best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ltconvert.convert.students.dreamer.router import Router
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.scores import last_hidden
from ltconvert.distill.precision import autocast
from ltconvert.distill.selection.compare import kl_sums

_NEVER = -1e4  # as balancing bias: no logit makes up for it


@torch.no_grad()
def pool_damage(
    model: LT2ForCausalLM,
    router: Router,
    batches: Sequence[Batch],
    *,
    precision: str = "fp32",
    done: Callable[[], None] = lambda: None,
) -> Tensor:
    """KL [E], nats a token, to the model of the model without each entry of a router's pool.

    Costs a forward pass an entry.

    Args:
        router: the model's own, of either pool; routing is learned wholly.
        done: called after each entry of a batch.
    """
    sums, tokens = [0.0] * len(router.balance), 0
    for batch in batches:
        batch = batch.to(model.device)
        with autocast(model.device, precision):
            whole_NC = last_hidden(model, batch)[batch.keep_BT]
            for entry in range(len(sums)):
                with _without(router, entry):
                    hidden_NC = last_hidden(model, batch)[batch.keep_BT]
                (kl,) = kl_sums(model, [hidden_NC], model, whole_NC)
                sums[entry] += kl
                done()
        tokens += len(whole_NC)
    return torch.tensor(sums, dtype=torch.float64) / max(tokens, 1)


@contextmanager
def _without(router: Router, entry: int) -> Iterator[None]:
    """Nobody chooses the entry."""
    kept = router.balance[entry].clone()
    router.balance[entry] = _NEVER
    try:
        yield
    finally:
        router.balance[entry] = kept
