"""Nanbeige 4.2 (``nanbeige``): a decoder as Llama's, all layers run ``num_loops`` times.

The final norm closes every loop and feeds the next one, unless ``skip_loop_final_norm`` leaves it
to the last (arXiv 2607.22083 and the published config). What else the published code can do, no
published checkpoint switches on; a config that does is refused.
"""

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
from ltconvert.errors import UserError

FAMILY_NAME = "nanbeige"
_NOT_COMPUTED = (
    "qk_layernorm", "emb_neighbor_num", "insert_ngram_layer_idx", "ngram_insert_all_layers",
    "enable_double_loop_split", "loop_middle_layers", "loop_share_kv", "enable_hyper_connection",
    "enable_mhc", "enable_h_res_identity", "enable_depth_attention",
)  # fmt: skip


def read_nanbeige(config: Config) -> TeacherSpec:
    """TeacherSpec of a ``nanbeige`` config.

    Raises:
        UserError: fewer than one loop, or an option that is not computed here.
    """
    if on := [name for name in _NOT_COMPUTED if config.get(name)]:
        raise UserError(
            f"this nanbeige config switches on {', '.join(on)}; only plain looped layers, as in "
            "Nanbeige4.2-3B, are supported"
        )
    loops = config.get("num_loops") or 1
    if loops < 1:
        raise UserError(f"num_loops is {loops}, expected 1 or more")
    width = config.get("head_dim") or config.get("kv_channels")
    common = common_fields({**config, "head_dim": width}, FAMILY_NAME, max_positions=262_144)
    layer_types = config.get("layer_types") or ["full_attention"] * common["num_layers"]
    rope, layer_rope = read_rope(
        config,
        layer_types=layer_types,
        head_dim=common["head_dim"],
        max_positions=common["max_position_embeddings"],
    )
    bias = bool(config.get("attention_bias", False))
    return TeacherSpec(
        **common,
        num_loops=loops,
        loop_norm="last" if config.get("skip_loop_final_norm") else "every",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        rope=rope,
        layer_rope=layer_rope,
        layer_windows=windows(layer_types, config.get("sliding_window")),
    )


FAMILIES = {"nanbeige": Family(FAMILY_NAME, read_nanbeige, pre_norm_names(), TOP_NAMES)}
