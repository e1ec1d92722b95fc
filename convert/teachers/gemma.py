"""Gemma 2 (``gemma2``) and the text models of Gemma 3 (``gemma3_text``).

Both store their norm weights minus one, scale the embeddings by sqrt(hidden), put a norm before
and after each branch and alternate windowed with full layers. Gemma 2 caps scores and logits;
Gemma 3 has q and k norms instead and another RoPE base in its windowed layers.
"""

from __future__ import annotations

from typing import Any

from ltconvert.convert.teachers.family import (
    ATTENTION_NAMES,
    MLP_NAMES,
    TOP_NAMES,
    Config,
    Family,
    common_fields,
    need,
    windows,
)
from ltconvert.convert.teachers.rope_config import complete_rope, read_rope
from ltconvert.convert.teachers.spec import TeacherSpec

FAMILY_NAME = "gemma"
LAYER_NAMES = {
    **ATTENTION_NAMES,
    **MLP_NAMES,
    "input_layernorm": "pre_mixer_norm",
    "post_attention_layernorm": "post_mixer_norm",
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
}
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def read_gemma2(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``gemma2`` config: windows in layers 0, 2, 4, ... and two soft caps."""
    common = _common_fields(config, max_positions=8192)
    layer_types = _layer_types(config, common["num_layers"], period=2)
    rope, layer_rope = read_rope(
        config,
        layer_types=layer_types,
        head_dim=common["head_dim"],
        max_positions=common["max_position_embeddings"],
    )
    return TeacherSpec(
        **common,
        attention_softcap=config.get("attn_logit_softcapping", 50.0),
        final_softcap=config.get("final_logit_softcapping", 30.0),
        rope=rope,
        layer_rope=layer_rope,
        layer_windows=windows(layer_types, config.get("sliding_window", 4096)),
    )


def read_gemma3_text(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``gemma3_text`` config: five windowed layers, one full, and so on.

    The score soft cap is not read: the published models have none and no runtime applies one.
    """
    common = _common_fields(config, max_positions=131_072)
    period = config.get("sliding_window_pattern") or 6
    layer_types = _layer_types(config, common["num_layers"], period=period)
    rope = _two_ropes(config, common["head_dim"], common["max_position_embeddings"])
    return TeacherSpec(
        **common,
        qk_norm="head",
        final_softcap=config.get("final_logit_softcapping"),
        rope=rope,
        layer_rope=tuple(layer_types),
        layer_windows=windows(layer_types, config.get("sliding_window", 4096)),
    )


def _common_fields(config: Config, *, max_positions: int) -> dict[str, Any]:
    defaults = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256}
    config = {**defaults, **config}
    config["hidden_act"] = config.get("hidden_activation") or "gelu_pytorch_tanh"
    common = common_fields(config, FAMILY_NAME, max_positions=max_positions)
    bias = bool(config.get("attention_bias", False))
    return {
        **common,
        "attention_scale": need(config, "query_pre_attn_scalar") ** -0.5,
        "embedding_scale": common["hidden_size"] ** 0.5,
        "norm_layout": "sandwich",
        "norm_offset": 1.0,
        "qkv_bias": bias,
        "o_bias": bias,
    }


def _layer_types(config: Config, layers: int, *, period: int) -> list[str]:
    return config.get("layer_types") or [
        _LOCAL if (layer + 1) % period else _GLOBAL for layer in range(layers)
    ]


def _two_ropes(config: Config, head_dim: int, max_positions: int) -> dict[str, dict[str, Any]]:
    """Gemma 3: ``rope_scaling`` and ``rope_theta`` of an old config mean the full layers alone."""
    nested = config.get("rope_parameters") or {}
    bases = {
        _GLOBAL: config.get("rope_theta") or 1_000_000.0,
        _LOCAL: config.get("rope_local_base_freq") or 10_000.0,
    }
    scaling = {_GLOBAL: config.get("rope_scaling") or {}, _LOCAL: {}}
    return {
        name: complete_rope(
            {**config, "rope_theta": base},
            {**(nested.get(name) or {}), **scaling[name]},
            head_dim,
            max_positions,
            base,
        )
        for name, base in bases.items()
    }


FAMILIES = {
    "gemma2": Family(FAMILY_NAME, read_gemma2, LAYER_NAMES, TOP_NAMES),
    "gemma3_text": Family(FAMILY_NAME, read_gemma3_text, LAYER_NAMES, TOP_NAMES),
}
