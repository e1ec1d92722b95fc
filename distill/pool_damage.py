"""How much of a Dreamer each entry of its pools is worth: the KL that doing without it costs.

What an entry adds to the stream says little of it: the first layer's attention adds almost nothing
and is worth most. Doing without one is what ``dreamer.shrink`` makes of it: a null in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ltconvert.convert.students.dreamer.router import Router
from ltconvert.convert.students.dreamer.shrink import nulls_in_place_of
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.data import Batch
from ltconvert.distill.evaluation.scores import last_hidden
from ltconvert.distill.precision import autocast
from ltconvert.distill.selection.compare import kl_sums

_NEVER = -1e4  # as a logit and as a bias: no key makes up for it, and no other bias


@dataclass(frozen=True)
class Damage:
    """KL added up so far, over one batch after the other and in each one entry after the other.

    Attributes:
        sums: nats of each entry; empty before the first pass.
        passes: forward passes without an entry.
    """

    sums: Sequence[float] = ()
    passes: int = 0


@torch.no_grad()
def pool_damage(
    model: LT2ForCausalLM,
    router: Router,
    batches: Sequence[Batch],
    *,
    precision: str = "fp32",
    so_far: Damage | None = None,
    done: Callable[[Damage], None] = lambda so_far: None,
) -> Tensor:
    """KL [E], nats a token, to the model of the model without each entry of a router's pool.

    Costs a forward pass an entry.

    Args:
        router: the model's own, of either pool; routing is learned wholly.
        so_far: what a call that was killed had found; its passes are not made again.
        done: called after each pass with all that is found so far.
    """
    found, entries = so_far or Damage(), router.experts
    sums = list(found.sums) or [0.0] * entries
    for batch in batches[found.passes // entries :]:
        batch = batch.to(model.device)
        with autocast(model.device, precision):
            whole_NC = last_hidden(model, batch)[batch.keep_BT]
            for entry in range(found.passes % entries, entries):
                with _without(router, entry):
                    hidden_NC = last_hidden(model, batch)[batch.keep_BT]
                (kl,) = kl_sums(model, [hidden_NC], model, whole_NC)
                sums[entry] += kl
                found = Damage(tuple(sums), found.passes + 1)
                done(found)
    tokens = sum(int(batch.keep_BT.sum()) for batch in batches)
    return torch.tensor(sums, dtype=torch.float64) / max(tokens, 1)


@contextmanager
def _without(router: Router, entry: int) -> Iterator[None]:
    """Nobody chooses the entry; a null stands in for it."""
    kept = router.keys, router.depth_logits, router.balance
    keys_ZC, logits_DZ = nulls_in_place_of(router, [entry])
    logits_DE = kept[1][:, : router.experts].clone()
    logits_DE[:, entry] = _NEVER
    keys_XC = torch.cat([kept[0][: router.experts], keys_ZC])
    router.keys = nn.Parameter(keys_XC, requires_grad=False)
    router.depth_logits = nn.Parameter(torch.cat([logits_DE, logits_DZ], 1), requires_grad=False)
    router.balance = kept[2].clone()
    router.balance[entry] = _NEVER
    try:
        yield
    finally:
        router.keys, router.depth_logits, router.balance = kept
