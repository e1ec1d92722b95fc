"""Does looping raise the rank of what one token writes into linear attention's states to T?

    python benchmarks/claims/update_rank.py

One Gated DeltaNet layer, visited in T loops, in fp64 on a CPU; no training, no chance. The layer's
own states say what a visit does: from an empty state a token leaves its write ``W = b k v^T``, from
the identity it leaves ``W`` and the transition ``A = I - b k k^T``. Writes are added up over the
visits, transitions multiplied.

The keys of the loops are made orthogonal: a token's embedding is a vector of signs, and the learned
loop residual flips signs between loops by the rows of a Hadamard matrix. Nothing else adds to the
stream (output projections are 0), and heads do not forget.

Every visit has a state of its own, and it begins empty in every loop, here as in the published
model. So the sum is what T visits write together, no single state holds it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import torch
from torch import Tensor

from ltconvert.benchmarks.claims.common import (
    NOT_SEEN,
    SEEN,
    Finding,
    claims_table,
    scratch_spec,
    table,
)
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM

# H heads, D head width, L loops.
WIDTH, HEADS, MOST_LOOPS = 8, 2, 4
VOCAB = 16
_RANK_TOLERANCE = 1e-9  # of the largest singular value; fp64 rounds at 1e-16


@torch.no_grad()
def layer_over_loops(
    loops: int, *, turning: bool = True, one_value: bool = False
) -> LT2ForCausalLM:
    """A model of one Gated DeltaNet layer whose keys in its loops are orthogonal.

    Args:
        turning: flip signs between loops; without it every loop sees the same token, key and value.
        one_value: every visit writes the same value, whatever its key.
    """
    torch.manual_seed(loops)
    spec = scratch_spec(
        VOCAB, layers=1, heads=HEADS, loops=loops, mlp=WIDTH, head_width=WIDTH // HEADS
    )
    spec = replace(spec, head_dim=WIDTH, qkv_bias=True)
    config = LT2Config.from_spec(spec, ["gdn"], loop_residual=True, short_conv=False)
    model = LT2ForCausalLM(config).double().eval()
    layer = model.model.layers[0]
    for name, parameter in layer.mixer.named_parameters():
        if name.endswith(("proj.weight", "v_proj.bias")):
            parameter.normal_()
    for head_DC in layer.mixer.k_proj.weight.unflatten(0, (HEADS, WIDTH)):
        head_DC.copy_(torch.linalg.qr(head_DC).Q)  # keys keep the angles of the stream
    layer.mixer.log_rate.fill_(-torch.inf)  # no decay: a transition is I - b k k^T
    if one_value:
        layer.mixer.v_proj.weight.zero_()
    layer.mixer.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.normal_().sign_()
    if turning:
        signs_LC = hadamard(WIDTH)[:loops]
        model.model.loop_residual[:-1] = signs_LC[1:] * signs_LC[:-1] - 1.0
    return model


def hadamard(size: int) -> Tensor:
    """Sylvester's matrix of orthogonal rows of signs; ``size`` is a power of 2."""
    rows = torch.ones(1, 1, dtype=torch.float64)
    while len(rows) < size:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    return rows


@torch.no_grad()
def visits(model: LT2ForCausalLM) -> tuple[Tensor, Tensor]:
    """Writes and transitions of one token in every loop, both [L, H, D, D]."""
    tokens = torch.tensor([[3, 5]])

    def after(state_DD: Tensor) -> Tensor:
        cache = model.new_cache()
        model(tokens[:, :1], cache=cache)  # the first token makes the states, which are then set
        for slot in cache.layers:
            slot.recurrent_states[0].copy_(state_DD)
        model(tokens[:, 1:], cache=cache)
        return torch.stack([slot.recurrent_states[0][0] for slot in cache.layers])

    eye_DD = torch.eye(WIDTH, dtype=torch.float64)
    writes = after(torch.zeros_like(eye_DD))
    return writes, after(eye_DD) - writes


def rank(matrices: Tensor) -> int:
    """The rank that all of the matrices [..., D, D] have."""
    ranks = torch.linalg.matrix_rank(matrices, rtol=_RANK_TOLERANCE).unique().tolist()
    assert len(ranks) == 1, f"ranks {ranks}"
    return ranks[0]


def ranks(loops: int) -> dict[str, int]:
    """Ranks over ``loops`` loops; the columns of the table."""
    writes_LHDD, transitions_LHDD = visits(layer_over_loops(loops))
    product_HDD = torch.eye(WIDTH, dtype=torch.float64).expand(HEADS, -1, -1)
    for transition_HDD in transitions_LHDD:
        product_HDD = transition_HDD @ product_HDD
    same_LHDD, _ = visits(layer_over_loops(loops, turning=False))
    one_value_LHDD, _ = visits(layer_over_loops(loops, one_value=True))
    return {
        "each visit's write": rank(writes_LHDD),
        "their sum": rank(writes_LHDD.sum(0)),
        "I - product of transitions": rank(torch.eye(WIDTH) - product_HDD),
        "sum, the same key in all loops": rank(same_LHDD.sum(0)),
        "sum, orthogonal keys, one value": rank(one_value_LHDD.sum(0)),
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the ranks and the claim."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    found = {loops: ranks(loops) for loops in range(1, MOST_LOOPS + 1)}
    names = list(found[1])
    rows = [[loops, *of.values()] for loops, of in found.items()]
    print("\n".join(table(["loops T", *names], rows)), end="\n\n")
    visit, total, product = names[:3]
    holds = all(of[visit] == 1 and of[total] == of[product] == loops for loops, of in found.items())
    finding = Finding(
        "one visit writes with rank 1, T visits with orthogonal keys with rank T",
        f"rank 1 a visit; sum {', '.join(str(of[total]) for of in found.values())} at T = "
        f"1 to {MOST_LOOPS}, if the values differ too",
        "exact",
        SEEN if holds else NOT_SEEN,
    )
    print("\n".join(claims_table([finding])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
