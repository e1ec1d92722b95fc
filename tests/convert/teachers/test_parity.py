"""Every family equals transformers' own model: logits, cached decoding, all config forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_hf import random_ids, tiny_hf

from ltconvert.convert.teachers.load import load_teacher

TOLERANCE = 1e-4

DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_SET = {**YARN, "attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2}
YARN_MSCALE = {**YARN, "mscale": 1.2, "mscale_all_dim": 0.6, "truncate": False}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-head_dim": ("llama", {"head_dim": 12}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-eps": ("llama", {"rms_norm_eps": 1e-2}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-set": ("llama", {"rope_parameters": YARN_SET}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN_MSCALE}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen2-layer_types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3-biases-yarn": (
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "rope_parameters": YARN},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-untied": (
        "smollm3",
        {"tie_word_embeddings": False, "no_rope_layers": [0, 1, 1, 0], "attention_bias": True},
    ),
    "smollm3-window": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 7, "no_rope_layer_interval": 2},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-biases-llama3": ("olmo2", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 12,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-no-caps": (
        "gemma2",
        {"head_dim": 8, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 12, "sliding_window": 7, "layer_types": None, "num_hidden_layers": 7},
    ),
    "gemma3-scaled": (
        "gemma3_text",
        {
            "head_dim": 12,
            "sliding_window": 5,
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 3.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": DEFAULT,
            },
        },
    ),
}


def oracle_logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    oracle = tiny_hf(model_type, **changes)
    oracle.save_pretrained(tmp_path)
    teacher = load_teacher(str(tmp_path))
    ids = random_ids()
    expected = oracle_logits(oracle, ids)
    assert expected.std() > 0.5  # small logits would hide a wrong formula
    with torch.no_grad():
        found = teacher.model(ids).logits
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("case", ["llama", "qwen2-window", "smollm3-window", "gemma2", "gemma3"])
def test_cached_decoding_equals_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    oracle = tiny_hf(model_type, **changes)
    oracle.save_pretrained(tmp_path)
    teacher = load_teacher(str(tmp_path))
    ids = random_ids(length=24)
    expected = oracle_logits(oracle, ids)
    cache = teacher.model.new_cache()
    parts = []
    with torch.no_grad():
        for chunk in (ids[:, :9], *ids[:, 9:].split(1, dim=1)):
            parts.append(teacher.model(chunk, cache=cache, use_cache=True).logits)
    assert (torch.cat(parts, 1) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "gemma3", "olmo2"])
def test_hidden_states_equal_transformers(case: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    oracle = tiny_hf(model_type, **changes)
    oracle.save_pretrained(tmp_path)
    model, ids = load_teacher(str(tmp_path)).model, random_ids(length=20)
    with torch.no_grad():
        found, wanted = (m(ids, output_hidden_states=True).hidden_states for m in (model, oracle))
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)
    call = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "use_cache": True}
    asked = {"output_hidden_states": True, "return_dict_in_generate": True}
    found, wanted = (m.generate(ids, **call, **asked).hidden_states for m in (model, oracle))
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_left_padding_equals_transformers(tmp_path: Path) -> None:
    oracle = tiny_hf("llama")
    oracle.save_pretrained(tmp_path)
    teacher = load_teacher(str(tmp_path))
    ids, mask = random_ids(length=12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        found = teacher.model(ids, attention_mask=mask).logits
    alone = oracle_logits(oracle, ids[:1, 5:])
    assert (found[:1, 5:] - alone).abs().max() < TOLERANCE
    assert (found[1:] - oracle_logits(oracle, ids[1:])).abs().max() < TOLERANCE


OLD_FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "theta": ("llama", {"rope_parameters": {**DEFAULT, "rope_theta": 77.0}}, {"rope_theta": 77.0}),
    "null": ("llama", {"rope_parameters": DEFAULT}, {"rope_theta": 1e4, "rope_scaling": None}),
    "truthy-default": (
        "qwen3",
        {"rope_parameters": {**DEFAULT, "rope_theta": 77.0}, "head_dim": 12},
        {"rope_theta": 77.0, "rope_scaling": {"rope_type": "default"}},
    ),
    "type": (
        "llama",
        {"rope_parameters": LINEAR},
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "llama3": (
        "llama",
        {"rope_parameters": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
    ),
    "yarn": (
        "qwen2",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 128}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    ),
    "gemma3": (
        "gemma3_text",
        CASES["gemma3-scaled"][1],
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "layer_types": None,
            "sliding_window_pattern": 2,
        },
    ),
    "ministral": (  # transformers loads a mistral config with layer_types as a ministral
        "ministral",
        {
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "sliding_window": 5,
            "head_dim": 8,
        },
        {"rope_theta": 1e4, "model_type": "mistral"},
    ),
    "gemma2-no-layer_types": (
        "gemma2",
        CASES["gemma2"][1],
        {"rope_theta": 1e4, "layer_types": None},
    ),
}


@pytest.mark.parametrize("form", OLD_FORMS)
def test_older_configs_mean_the_same(form: str, tmp_path: Path) -> None:
    model_type, changes, old = OLD_FORMS[form]
    oracle = tiny_hf(model_type, **changes)
    oracle.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, **old}))
    ids = random_ids()
    with torch.no_grad():
        found = load_teacher(str(tmp_path)).model(ids).logits
    assert (found - oracle_logits(oracle, ids)).abs().max() < TOLERANCE


def test_one_rope_a_layer_type_and_none(tmp_path: Path) -> None:
    """Nested rope_parameters with null: that layer type has no positions, as in SmolLM3."""
    layer_types = ["full_attention", "sliding_attention"] * 2
    oracle = tiny_hf(
        "smollm3",
        layer_types=layer_types,
        use_sliding_window=True,
        sliding_window=7,
        no_rope_layers=[1, 0, 1, 0],
    )
    oracle.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    theta = config["rope_parameters"]["rope_theta"]
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": theta},
        "sliding_attention": None,
    }
    config["no_rope_layers"] = [1, 1, 1, 1]
    path.write_text(json.dumps(config))
    ids = random_ids()
    with torch.no_grad():
        found = load_teacher(str(tmp_path)).model(ids).logits
    assert (found - oracle_logits(oracle, ids)).abs().max() < TOLERANCE
