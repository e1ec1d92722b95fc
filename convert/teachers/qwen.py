"""Qwen2, Qwen2.5 (``qwen2``: biases on q, k and v) and Qwen3 (``qwen3``: q and k norms a head)."""

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

FAMILY_NAME = "qwen"


def read_qwen2(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``qwen2`` config."""
    return _read(config, qkv_bias=True)


def read_qwen3(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``qwen3`` config; its head_dim is 128 unless the config says otherwise."""
    bias = bool(config.get("attention_bias", False))
    config = {**config, "head_dim": config.get("head_dim") or 128}
    return _read(config, qk_norm="head", qkv_bias=bias, o_bias=bias)


def _read(config: Config, **fields: Any) -> TeacherSpec:
    common = common_fields(config, FAMILY_NAME, max_positions=32_768)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first_windowed = config.get("max_window_layers", 28)
    layer_types = config.get("layer_types") or [
        "sliding_attention" if window is not None and layer >= first_windowed else "full_attention"
        for layer in range(common["num_layers"])
    ]
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
    "qwen2": Family(FAMILY_NAME, read_qwen2, pre_norm_names(), TOP_NAMES),
    "qwen3": Family(FAMILY_NAME, read_qwen3, pre_norm_names(), TOP_NAMES),
}
