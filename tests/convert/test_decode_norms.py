"""Norms made ahead, by the kernel that adds a branch, against the uncached forward pass.

Every norm has weights of its own, and so has every loop where layers are tied.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import diagonal, tiny_model, tiny_spec, tokens

from ltconvert.convert import decode_layers
from ltconvert.convert.decoding import Decoder
from ltconvert.convert.mixers.norm import RMSNorm
from ltconvert.convert.students.exits import core_layers
from ltconvert.kernels.decode_norm import decode_norms

LAYERS, SEEN, NEW = 6, 5, 3
MIXERS = ["gdn", "moda", "gdn_window", "dsa", "full", "nsa"]
SMALL = {"window_tokens": 3, "top_k_tokens": 3, "block_tokens": 2, "chosen_blocks": 2}
LOOPS: dict[str, dict[str, Any]] = {
    "dense": {"num_loops": 1},
    "looped": {"num_loops": 3},
    "tied": {"num_loops": 2, "tied_rank": 2},
    "own norms": {"num_loops": 2, "tied_rank": 0},
    "around": {"num_loops": 2, "prelude_layers": 2, "coda_layers": 2},
    "tied around": {"num_loops": 2, "prelude_layers": 2, "coda_layers": 2, "tied_rank": 2},
    "no kernel's activation": {"num_loops": 2, "hidden_act": "relu"},
}


def ahead(model: Any) -> int:
    """How many norms of a step are read by a product behind a norm, with nothing in between."""
    spec, schedule = model.model.spec, model.model.schedule
    if spec.norm_layout not in ("sandwich", "outer"):
        return 0
    if spec.hidden_act not in decode_layers.ACTIVATIONS:
        return len(schedule)  # of the MLP alone
    core = core_layers(model.model)
    alike = [(a.loop, a.layer in core) == (b.loop, b.layer in core) for a, b in pairwise(schedule)]
    return len(schedule) + sum(alike)


@pytest.mark.parametrize(
    ("family", "loops"),
    diagonal(["gemma2", "olmo2", "ouro", "huginn", "llama"], list(LOOPS), each=3),
)
def test_logits_are_those_of_a_pass_whose_norms_all_differ(
    family: str, loops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64, so that rounding hides nothing; RoPE tables are fp32."""
    changes = {"prelude_layers": 0, "coda_layers": 0} | LOOPS[loops]
    size = {"num_layers": LAYERS, "layer_rope": ("default",) * LAYERS}
    size |= {"layer_windows": (None,) * LAYERS, "rope": tiny_spec().rope}
    spec = tiny_spec(family, **size, **changes)
    model = tiny_model(spec, MIXERS, **SMALL, loop_residual=spec.num_loops > 1).double()
    with torch.no_grad():
        for index, norm in enumerate(x for x in model.modules() if isinstance(x, RMSNorm)):
            norm.weight.mul_(1 + 0.1 * index)
    made = []

    def noted(*given: Any, **options: Any) -> Any:
        made.append(decode_norms(*given, **options))
        return made[-1]

    monkeypatch.setattr(decode_layers, "decode_norms", noted)
    ids_BT, found = tokens(2, SEEN + NEW), []
    decoder = Decoder(model, 2, SEEN + NEW)
    decoder.prefill(ids_BT[:, :SEEN], [0, 0])
    with torch.no_grad():
        for index in range(SEEN, SEEN + NEW):
            found.append(decoder.step(ids_BT[:, index]))
        whole = model(ids_BT).logits[:, SEEN:]
    torch.testing.assert_close(torch.stack(found, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert len(made) == NEW * ahead(model)
