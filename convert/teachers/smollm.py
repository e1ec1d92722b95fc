"""SmolLM3 (``smollm3``): every fourth layer has no positions. SmolLM and SmolLM2 are ``llama``."""

from __future__ import annotations

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

FAMILY_NAME = "smollm"


def read_smollm3(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``smollm3`` config; ``no_rope_layers`` holds 1 where a layer rotates."""
    config = {"tie_word_embeddings": True, **config}
    common = common_fields(config, FAMILY_NAME, max_positions=32_768)
    layers = range(common["num_layers"])
    interval = config.get("no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in layers]
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    layer_types = config.get("layer_types") or [
        "full_attention" if window is None or rotates[layer] else "sliding_attention"
        for layer in layers
    ]
    rope, layer_rope = read_rope(
        config,
        layer_types=layer_types,
        head_dim=common["head_dim"],
        max_positions=common["max_position_embeddings"],
        default_theta=2_000_000.0,
    )
    bias = bool(config.get("attention_bias", False))
    return TeacherSpec(
        **common,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        rope=rope,
        layer_rope=tuple(name if rotates[layer] else None for layer, name in enumerate(layer_rope)),
        layer_windows=windows(layer_types, window),
    )


FAMILIES = {"smollm3": Family(FAMILY_NAME, read_smollm3, pre_norm_names(), TOP_NAMES)}
