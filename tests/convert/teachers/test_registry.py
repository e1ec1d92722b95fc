"""Which configs are teachers, and the one line that refuses the others."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_hf import SIZES

from ltconvert.convert.teachers.registry import FAMILIES, family_of
from ltconvert.errors import UserError

SUPPORTED = (
    "llama, mistral, qwen2, qwen3, smollm3, olmo2, gemma2, gemma3_text, ouro, nanbeige, "
    "huginn_raven"
)


def refused(config: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        family_of(config)
    message = str(caught.value)
    assert "\n" not in message
    assert SUPPORTED in message
    return message


def test_the_list() -> None:
    assert ", ".join(FAMILIES) == SUPPORTED


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "encoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder"),
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "mixture of experts"),
        ({"model_type": "gemma3", "vision_config": {}, "text_config": {}}, "gemma3"),
        ({"model_type": "gemma3", "vision_config": {"hidden_size": 8}}, "multimodal"),
        ({"model_type": "qwen2_vl"}, "multimodal"),
        ({"arch": {"name": "trm", "H_cycles": 3, "L_cycles": 6}}, "tiny recursive"),
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "hrm_text"}, "two stacks that call each other"),
        ({"model_type": "inkling2_loop", "text_config": {}}, "a looped mixture of experts"),
        ({"hidden_size": 8}, "without model_type"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "no lang"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "qwen2", "is_causal": False}, "attend to later ones: an encoder"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "later ones"),
    ],
)
def test_refusals(config: dict[str, Any], word: str) -> None:
    assert word in refused(config)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "num_hidden_layers"])
def test_a_missing_field_is_named(key: str) -> None:
    config = {**SIZES, "model_type": "llama"}
    del config[key]
    with pytest.raises(UserError, match=key):
        family_of(config).read_spec(config)


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "longrope"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_unsupported_rope(rope: dict[str, Any], word: str) -> None:
    config = {**SIZES, "model_type": "llama", "rope_parameters": {"rope_theta": 1e4, **rope}}
    with pytest.raises(UserError, match=word) as caught:
        family_of(config).read_spec(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "changes", "word"),
    [
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
        ("gemma2", {"sliding_window": None}, "sliding_window is null"),
        (
            "smollm3",
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 7},
            "switched off",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear"}},
            "do not agree",
        ),
    ],
)
def test_what_a_config_leaves_open_is_refused(
    model_type: str, changes: dict[str, Any], word: str
) -> None:
    """transformers refuses these too, or reads them in a way that nobody meant."""
    config = {**SIZES, "model_type": model_type, **changes}
    with pytest.raises(UserError, match=word) as caught:
        family_of(config).read_spec(config)
    assert "\n" not in str(caught.value)


def test_uneven_heads_are_refused() -> None:
    config = {**SIZES, "model_type": "llama", "num_key_value_heads": 3}
    with pytest.raises(UserError, match="4 query heads"):
        family_of(config).read_spec(config)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_names_go_there_and_back(model_type: str) -> None:
    family = FAMILIES[model_type]
    for module in family.layer_names:
        published = f"model.layers.11.{module}.weight"
        canonical = family.rename(published)
        assert (canonical is not None and canonical != published) or "mlp" in module
        assert family.publish(canonical) == published
    assert family.rename("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    with pytest.raises(UserError, match="lora_A"):
        family.rename("model.layers.0.self_attn.q_proj.lora_A.weight")
    with pytest.raises(UserError, match="no place"):
        family.publish("model.layers.0.mixer.gate_proj.weight")
