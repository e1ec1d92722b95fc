"""Tiny random models of every family's architecture, shared by the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch

from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.teachers.spec import TeacherSpec

NUM_LAYERS = 3
VOCAB = 97

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,  # not hidden_size // num_attention_heads
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attention_scale": 12**-0.5,
    "rope": {"default": {"rope_type": "default", "rope_theta": 10_000.0}},
    "layer_rope": ("default",) * NUM_LAYERS,
    "layer_windows": (None,) * NUM_LAYERS,
}
_DIFFERENCES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "smollm3": {"layer_rope": ("default", None, "default")},
    "olmo2": {"norm_layout": "post", "qk_norm": "full"},
    "gemma2": {
        "norm_layout": "sandwich",
        "norm_offset": 1.0,
        "attention_softcap": 5.0,
        "final_softcap": 3.0,
        "embedding_scale": 32**0.5,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_windows": (7, None, 7),
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "norm_layout": "sandwich",
        "norm_offset": 1.0,
        "qk_norm": "head",
        "layer_windows": (7, 7, None),
        "rope": {
            "local": {"rope_type": "default", "rope_theta": 10_000.0},
            "global": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
        "layer_rope": ("local", "local", "global"),
    },
    "ouro": {
        "norm_layout": "sandwich",
        "loop_norm": "every",
        "exit_gate": True,
        "num_key_value_heads": 4,
        "num_loops": 4,
    },
}
FAMILIES = tuple(_DIFFERENCES)
_DIFFERENCES["huginn"] = {  # beside the others: two of three layers do not loop
    "norm_layout": "outer",
    "loop_norm": "core",
    "initial_state_std": 0.1,
    "embedding_scale": 32**0.5,
    "qkv_bias": True,
    "num_loops": 3,
    "prelude_layers": 1,
    "coda_layers": 1,
    "tie_word_embeddings": True,
}


def tiny_spec(family: str = "llama", **changes: Any) -> TeacherSpec:
    """The architecture of a family at toy size; sizes are odd on purpose."""
    return replace(TeacherSpec(family=family, **{**_BASE, **_DIFFERENCES[family]}), **changes)


def scatter(model: torch.nn.Module, seed: int = 0) -> None:
    """Random weights large enough that a wrong formula shows, norms and neutral starts included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1 or "norm" in name or "conv" in name or "rate" in name:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def tiny_model(
    spec: TeacherSpec, mixers: list[str] | None = None, seed: int = 0, **options: Any
) -> LT2ForCausalLM:
    """A random teacher (``mixers`` left out) or student."""
    model = LT2ForCausalLM(LT2Config.from_spec(spec, mixers, **options)).eval()
    scatter(model, seed)
    if model.model.depth_plan is not None:
        model.model.depth_schedule.fill_(0.7)
    if model.model.dreamer is not None:
        model.model.dreamer.set_release(0.6)
    return model


def tokens(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random token ids [rows, length]; 0 is left for padding."""
    return torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def kept_bytes(model: LT2ForCausalLM, length: int, precision: str, **given: Any) -> int:
    """Bytes that a pass over one row keeps for the backward pass, weights aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = x  # held, so that the address is not used again
        return x

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        state = model.model(tokens(1, length), **given).last_hidden_state
    assert state.requires_grad
    return sum(x.untyped_storage().nbytes() for x in found.values())


def covering(*choices: Sequence[Any]) -> list[Any]:
    """All combinations, for ``parametrize``; ``slow`` but for some that hold every pair of values.

    Greedy: the next one is that with most pairs not seen yet.
    """
    left = list(product(*(range(len(values)) for values in choices)))
    unseen = {pair for one in left for pair in _pairs(one)}
    kept = []
    while unseen:
        best = max(left, key=lambda one: len(unseen & _pairs(one)))
        left.remove(best)
        unseen -= _pairs(best)
        kept.append(best)
    return [_case(choices, one) for one in kept] + [_case(choices, one, "slow") for one in left]


def diagonal(rows: Sequence[Any], columns: Sequence[Any], each: int = 2) -> list[Any]:
    """All pairs, for ``parametrize``; ``slow`` but for ``each`` rows a column, taken in turn."""
    return [
        _case((rows, columns), (r, c), *(() if (r - c * each) % len(rows) < each else ("slow",)))
        for r, c in product(range(len(rows)), range(len(columns)))
    ]


def _pairs(one: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(one), 2))


def _case(choices: Sequence[Sequence[Any]], one: tuple[int, ...], *marks: str) -> Any:
    values = [values[index] for values, index in zip(choices, one, strict=True)]
    return pytest.param(*values, marks=[getattr(pytest.mark, name) for name in marks])
