"""Llama 1 to 3, SmolLM, SmolLM2, TinyLlama (all ``llama``), and Mistral (``mistral``)."""

from __future__ import annotations

from typing import Any

from ltconvert.convert.teachers.family import (
    TOP_NAMES,
    Config,
    Family,
    common_fields,
    need,
    pre_norm_names,
    windows,
)
from ltconvert.convert.teachers.rope_config import read_rope
from ltconvert.convert.teachers.spec import TeacherSpec

FAMILY_NAME = "llama"


def read_llama(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``llama`` config; ``attention_bias`` covers q, k, v and o."""
    bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    types = ["full_attention"] * need(config, "num_hidden_layers")
    return _read(config, types, None, 2048, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def read_mistral(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``mistral`` config: one window, for all layers unless it names their types.

    Configs that do are Ministral's.
    """
    # Mistral's own default, where the config does not mention a window.
    window = config.get("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    types = config.get("layer_types") or [kind] * need(config, "num_hidden_layers")
    return _read(config, types, window, 4096 * 32)


def _read(
    config: Config, layer_types: list[str], window: int | None, max_positions: int, **fields: Any
) -> TeacherSpec:
    common = common_fields(config, FAMILY_NAME, max_positions=max_positions)
    rope, layer_rope = read_rope(
        config,
        layer_types=layer_types,
        head_dim=common["head_dim"],
        max_positions=common["max_position_embeddings"],
    )
    return TeacherSpec(
        **common,
        **fields,
        rope=rope,
        layer_rope=layer_rope,
        layer_windows=windows(layer_types, window),
    )


FAMILIES = {
    "llama": Family(FAMILY_NAME, read_llama, pre_norm_names(), TOP_NAMES),
    "mistral": Family(FAMILY_NAME, read_mistral, pre_norm_names(), TOP_NAMES),
}
