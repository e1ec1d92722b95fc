"""Ouro (``ouro``): a looped decoder, all layers run ``total_ut_steps`` times (arXiv 2510.25741).

Four norms a layer, all inside the residual branch; ``model.norm`` closes every loop and feeds
the next one; an exit gate scores leaving after each loop. The published remote code runs on no
transformers 5, so the published config and tensor names are read here directly.
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
    windows,
)
from ltconvert.convert.teachers.rope_config import ONE_ROPE, read_rope
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.errors import UserError

FAMILY_NAME = "ouro"
LAYER_NAMES = {
    **ATTENTION_NAMES,
    **MLP_NAMES,
    "input_layernorm": "pre_mixer_norm",
    "input_layernorm_2": "post_mixer_norm",
    "post_attention_layernorm": "pre_mlp_norm",
    "post_attention_layernorm_2": "post_mlp_norm",
}
# The ids in the tokenizer that all Ouro models share. The published config calls <|endoftext|>
# bos, eos and pad alike, and a chat turn then never ends.
ENDOFTEXT, IM_END = 0, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def read_ouro(config: Config) -> TeacherSpec:
    """TeacherSpec of an ``ouro`` config.

    Raises:
        UserError: fewer than one loop.
    """
    common = common_fields(config, FAMILY_NAME, max_positions=32_768)
    loops = config.get("total_ut_steps", 4)
    if loops < 1:
        raise UserError(f"total_ut_steps is {loops}, expected 1 or more loops")
    layer_types = config.get("layer_types") or ["full_attention"] * common["num_layers"]
    rope, layer_rope = read_rope(
        config,
        layer_types=layer_types,
        head_dim=common["head_dim"],
        max_positions=common["max_position_embeddings"],
    )
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    common["eos_token_id"] = _eos_ids(common["eos_token_id"])
    if common["pad_token_id"] is None:
        common["pad_token_id"] = ENDOFTEXT
    return TeacherSpec(
        **common,
        num_loops=loops,
        norm_layout="sandwich",
        loop_norm="every",
        exit_gate=True,
        rope=rope,
        layer_rope=layer_rope,
        layer_windows=windows(layer_types, window),
    )


def published_config(spec: TeacherSpec) -> Config:
    """The fields of the published config.json that the spec determines."""
    rope: dict[str, Any] = dict(spec.rope[ONE_ROPE])
    theta = rope.pop("rope_theta")
    return {
        "model_type": "ouro",
        "architectures": ["OuroForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "hidden_act": spec.hidden_act,
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "total_ut_steps": spec.num_loops,
        "early_exit_threshold": 1.0,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * spec.num_layers,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_id,
        "pad_token_id": spec.pad_token_id,
    }


def _eos_ids(published: int | list[int] | None) -> list[int]:
    """Both ends, that of a chat turn first, and whatever else the config names."""
    named = published if isinstance(published, list) else [published]
    return [IM_END, ENDOFTEXT] + [i for i in named if i not in (None, IM_END, ENDOFTEXT)]


FAMILIES = {
    "ouro": Family(
        FAMILY_NAME,
        read_ouro,
        LAYER_NAMES,
        {**TOP_NAMES, "model.early_exit_gate": "model.exit_gate"},
    )
}
