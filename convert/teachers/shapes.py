"""Architectures of published models by name, for measurements that need no weights."""

from __future__ import annotations

import difflib
from typing import Any

from ltconvert.convert.teachers.registry import family_of
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError


def _config(
    model_type: str, layers: int, hidden: int, mlp: int, heads: tuple[int, int], **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        **more,
    }


_SMOLLM2 = {"vocab_size": 49_152, "rope_theta": 1e5, "tie_word_embeddings": True}
_QWEN3 = {
    "vocab_size": 151_936,
    "rope_theta": 1e6,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_OURO = {"vocab_size": 49_152, "rope_theta": 1e6, "head_dim": 128, "total_ut_steps": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": _config("llama", 30, 576, 1536, (9, 3), **_SMOLLM2),
    "smollm2-360m": _config("llama", 32, 960, 2560, (15, 5), **_SMOLLM2),
    "smollm2-1.7b": _config("llama", 24, 2048, 8192, (32, 32), **_SMOLLM2),
    "qwen3-0.6b": _config("qwen3", 28, 1024, 3072, (16, 8), **_QWEN3),
    "qwen3-1.7b": _config("qwen3", 28, 2048, 6144, (16, 8), **_QWEN3),
    "ouro-1.4b": _config("ouro", 24, 2048, 5632, (16, 16), **_OURO),
    "ouro-2.6b": _config("ouro", 48, 2048, 5632, (16, 16), **_OURO),
}


def shape_spec(name: str) -> TeacherSpec:
    """The architecture of a published model.

    Raises:
        UserError: it is none of SHAPES.
    """
    if name not in SHAPES:
        near = difflib.get_close_matches(name, SHAPES, 1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(SHAPES)}"
        raise UserError(f"unknown shape {name!r}; {hint}")
    config = SHAPES[name]
    return family_of(config).read_spec(config)
