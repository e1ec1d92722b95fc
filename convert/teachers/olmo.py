"""OLMo 2 (``olmo2``): norms after the branches, q and k norms over the whole projection."""

from __future__ import annotations

from ltconvert.convert.teachers.family import (
    ATTENTION_NAMES,
    MLP_NAMES,
    TOP_NAMES,
    Config,
    Family,
    common_fields,
    windows,
)
from ltconvert.convert.teachers.rope_config import read_rope
from ltconvert.convert.teachers.spec import TeacherSpec

FAMILY_NAME = "olmo"
LAYER_NAMES = {
    **ATTENTION_NAMES,
    **MLP_NAMES,
    "post_attention_layernorm": "post_mixer_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}


def read_olmo2(config: Config) -> TeacherSpec:
    """TeacherSpec of an ``olmo2`` config."""
    config = {"rms_norm_eps": 1e-5, **config}
    common = common_fields(config, FAMILY_NAME, max_positions=2048)
    layer_types = ["full_attention"] * common["num_layers"]
    rope, layer_rope = read_rope(
        config,
        layer_types=layer_types,
        head_dim=common["head_dim"],
        max_positions=common["max_position_embeddings"],
    )
    bias = bool(config.get("attention_bias", False))
    return TeacherSpec(
        **common,
        norm_layout="post",
        qk_norm="full",
        qkv_bias=bias,
        o_bias=bias,
        rope=rope,
        layer_rope=layer_rope,
        layer_windows=windows(layer_types, None),
    )


FAMILIES = {"olmo2": Family(FAMILY_NAME, read_olmo2, LAYER_NAMES, TOP_NAMES)}
