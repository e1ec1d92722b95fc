"""Llama 1 to 3, SmolLM, SmolLM2, TinyLlama (all ``llama``), and Mistral (``mistral``)."""

from __future__ import annotations

from typing import Any

from ltconvert.convert.teachers.family import (
    TOP_NAMES,
    Config,
    Family,
    common_fields,
    pre_norm_names,
    windows,
)
from ltconvert.convert.teachers.rope_config import read_rope
from ltconvert.convert.teachers.spec import TeacherSpec

FAMILY_NAME = "llama"


def read_llama(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``llama`` config; ``attention_bias`` covers q, k, v and o."""
    bias = bool(config.get("attention_bias", False))
    return _read(config, ["full_attention"], max_positions=2048, qkv_bias=bias, o_bias=bias)


def read_mistral(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``mistral`` config: one window for all layers, or none."""
    return _read(config, ["sliding_attention"], max_positions=4096 * 32)


def _read(config: Config, kind: list[str], *, max_positions: int, **fields: Any) -> TeacherSpec:
    common = common_fields(config, FAMILY_NAME, max_positions=max_positions)
    layer_types = kind * common["num_layers"]
    rope, layer_rope = read_rope(
        config,
        layer_types=layer_types,
        head_dim=common["head_dim"],
        max_positions=common["max_position_embeddings"],
    )
    return TeacherSpec(
        **common,
        **fields,
        mlp_bias=bool(config.get("mlp_bias", False)),
        rope=rope,
        layer_rope=layer_rope,
        # Mistral's own default, where the config does not mention a window.
        layer_windows=windows(layer_types, config.get("sliding_window", 4096)),
    )


FAMILIES = {
    "llama": Family(FAMILY_NAME, read_llama, pre_norm_names(), TOP_NAMES),
    "mistral": Family(FAMILY_NAME, read_mistral, pre_norm_names(), TOP_NAMES),
}
