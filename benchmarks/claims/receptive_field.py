"""How far back does a looped window reach?

    python benchmarks/claims/receptive_field.py

N layers of window attention (w tokens, the token itself counted), T loops, random weights, fp64 on
a CPU. A token is within reach where the gradient of the last position's output is not exactly 0: a
masked score has the weight 0, not a small one. No training, no chance.

A visit looks back w - 1 tokens, so N T visits reach N T (w - 1) + 1 tokens, the last one counted:
with one layer T (w - 1) + 1, which is how the claim's T w is to be read.
"""

from __future__ import annotations

import argparse
import sys

import torch

from ltconvert.benchmarks.claims.common import (
    NOT_SEEN,
    SEEN,
    Finding,
    claims_table,
    scratch_spec,
    table,
)
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM

WINDOWS, LAYERS, LOOPS = (2, 4, 8), (1, 3), (1, 2, 3, 4)
_BEYOND = 5  # tokens before the expected reach: enough to see it end


def expected_reach(window: int, layers: int, loops: int) -> int:
    """Tokens that the last position's output may depend on, itself among them."""
    return layers * loops * (window - 1) + 1


def window_model(window: int, layers: int, loops: int) -> LT2ForCausalLM:
    """Random weights, every layer a window."""
    torch.manual_seed(0)
    spec = scratch_spec(8, layers=layers, heads=2, loops=loops, mlp=16, head_width=4)
    config = LT2Config.from_spec(
        spec, ["window"] * layers, window_tokens=window, loop_residual=True
    )
    return LT2ForCausalLM(config).double().eval()


def reach(window: int, layers: int, loops: int) -> int:
    """Tokens that it does depend on: from the first one with a gradient to the last."""
    model = window_model(window, layers, loops)
    length = expected_reach(window, layers, loops) + _BEYOND
    tokens = torch.randint(0, 8, (1, length), generator=torch.Generator().manual_seed(1))
    inputs_BTC = model.model.embed(tokens).detach().requires_grad_(True)
    last_C = model.model(inputs_embeds=inputs_BTC).last_hidden_state[0, -1]
    (last_C * torch.arange(1.0, len(last_C) + 1)).sum().backward()
    assert inputs_BTC.grad is not None
    touched_T = (inputs_BTC.grad[0] != 0).any(-1)
    return length - int(touched_T.nonzero()[0])


def main(arguments: list[str] | None = None) -> int:
    """Print reach and expectation, and the claim."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    cases = [(w, n, t) for w in WINDOWS for n in LAYERS for t in LOOPS]
    found = {case: reach(*case) for case in cases}
    rows = [[*case, found[case], expected_reach(*case), case[0] * case[2]] for case in cases]
    names = ["window w", "layers N", "loops T", "reach", "N T (w - 1) + 1", "T w"]
    print("\n".join(table(names, rows)), end="\n\n")
    finding = Finding(
        "T loops of a window of w tokens reach back of the order of T w a layer",
        "N T (w - 1) + 1 tokens in all cases: with one layer T (w - 1) + 1, so T w at most",
        "exact",
        SEEN if all(found[case] == expected_reach(*case) for case in cases) else NOT_SEEN,
    )
    print("\n".join(claims_table([finding])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
