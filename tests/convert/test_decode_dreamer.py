"""A Dreamer on the fast path: the tokens of ``generate()``, and nothing that a graph cannot hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dreamer_case import released
from helpers import FAMILIES, covering, tokens

from ltconvert.convert.decoding import Decoder
from ltconvert.convert.students.dreamer.depths import set_depths
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.students.static_cache import StaticCache
from ltconvert.kernels import dispatch

LENGTHS, NEW = (11, 3, 7), 6
OPTIONS: list[dict[str, Any]] = [
    {},
    {"slices": 4, "top_experts": 6},
    {"parallel": True, "stream_norm": True, "select_by": "scores"},
    {"depth_heads": 0, "shared_size": 0, "top_entries": 1},
    {"slices": 2, "null_entries": 1, "null_experts": 2},
]


def dreamer(
    family: str, kind: str = "full", release: float = 1.0, **options: Any
) -> LT2ForCausalLM:
    """Random in all of its parts, fp64."""
    model = released(family, kind, **options).double()
    layer, generator = model.model.dreamer, torch.Generator().manual_seed(7)
    parts = [layer.attention_router.balance, layer.expert_router.balance]
    parts += [p for name, p in layer.named_parameters() if p.dim() < 2 or "down_proj" in name]
    with torch.no_grad():
        for part in parts:
            part += 0.2 * torch.randn(part.shape, generator=generator)
    layer.set_release(release)
    return model


def prompts() -> dict[str, torch.Tensor]:
    """Rows of LENGTHS tokens, padded at the left."""
    ids, mask = torch.zeros(2, len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, -length:], mask[row, -length:] = tokens(1, length, seed=length), 1
    return {"input_ids": ids, "attention_mask": mask}


def plain(model: LT2ForCausalLM, given: dict[str, torch.Tensor]) -> list[list[int]]:
    """What transformers' loop generates behind the prompts."""
    whole = model.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return whole[:, given["input_ids"].shape[1] :].tolist()


def check_as_generate(model: LT2ForCausalLM) -> None:
    """Tokens of ragged rows, whose prompts come in chunks, and logits of a step."""
    decoder = Decoder(model, len(LENGTHS), max(LENGTHS) + NEW, prefill_tokens=4)
    found = decoder.generate(**prompts(), max_new_tokens=NEW)
    assert found.tolist() == plain(model, prompts())
    with torch.no_grad():
        decoder.prefill(prompts()["input_ids"], [max(LENGTHS) - n for n in LENGTHS])
        logits = [decoder.step(token_B) for token_B in found[:, :2].T][-1]
        for row, length in enumerate(LENGTHS):
            ids = torch.cat([prompts()["input_ids"][row, -length:], found[row, :2]])
            wanted = model(ids[None]).logits[0, -1]
            torch.testing.assert_close(logits[row], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "release"), covering([*FAMILIES, "huginn"], OPTIONS, [0.0, 0.4, 1.0])
)
def test_tokens_are_those_of_generate(
    family: str, options: dict[str, Any], release: float
) -> None:
    check_as_generate(dreamer(family, release=release, **options))


@pytest.mark.parametrize("kind", ["window", "gdn", "gdn_window", "kda", "mamba2", "retnet"])
def test_mixers_of_the_layers_are_taken_along(kind: str) -> None:
    check_as_generate(dreamer("qwen3" if kind == "gdn" else "llama", kind, slices=2))
    
