"""Layer map, parameter counts and cache sizes, against real models and real caches."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, NUM_LAYERS, tiny_model, tiny_spec, tokens

from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.students.lt2_base import CACHE_NAME
from ltconvert.convert.teachers.spec import TeacherSpec

MIXERS = {
    "full": ["full"] * NUM_LAYERS,
    "linear": ["gdn"] * NUM_LAYERS,
    "windowed": ["gdn_window"] * NUM_LAYERS,
    "dsa": ["dsa"] * NUM_LAYERS,
    "nsa": ["nsa"] * NUM_LAYERS,
    "hybrid": ["gdn", "full", "window"],
    "delta": ["kda", "deltanet", "kda"],
    "decay": ["retnet", "retnet", "mamba2"],
    "moda": ["moda", "gdn", "moda"],
}
SMALL = {"window_tokens": 5, "block_tokens": 2}


def ouro_1_4b() -> TeacherSpec:
    """The published config of Ouro-1.4B."""
    return TeacherSpec(
        family="ouro",
        vocab_size=49152,
        hidden_size=2048,
        intermediate_size=5632,
        num_layers=24,
        num_loops=4,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        attention_scale=128**-0.5,
        rope={"default": {"rope_type": "default", "rope_theta": 1e6}},
        layer_rope=("default",) * 24,
        layer_windows=(None,) * 24,
        norm_layout="sandwich",
        loop_norm="every",
        exit_gate=True,
    )


def unique_parameters(model: LT2ForCausalLM) -> int:
    """By memory, so that a tied head counts once."""
    return sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())


def stored_bytes(cache: object) -> int:
    """All tensors that the layers of a cache hold, but their one-number counters."""
    total = 0
    for layer in cache.layers:  # type: ignore[attr-defined]
        for value in vars(layer).values():
            found = value if isinstance(value, list) else [value]
            if isinstance(value, dict):
                found = list(value.values())
            tensors = [x for x in found if isinstance(x, torch.Tensor) and x.ndim > 0]
            total += sum(x.numel() * x.element_size() for x in tensors)
    return total


@pytest.mark.parametrize("mixers", MIXERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_equal_the_real_model(family: str, mixers: str) -> None:
    model = tiny_model(tiny_spec(family), MIXERS[mixers], **SMALL)
    facts = model_facts(model.config)
    assert facts.parameters == unique_parameters(model)
    for layer, block in zip(facts.layers, model.model.layers, strict=True):
        assert layer.parameters == sum(p.numel() for p in block.parameters())
        assert layer.mixer_parameters == sum(p.numel() for p in block.mixer.parameters())
    tied = model.config.tie_word_embeddings
    assert facts.head_parameters == (0 if tied else model.head_weight.numel())


@pytest.mark.parametrize("length", [4, 24])
@pytest.mark.parametrize("mixers", MIXERS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "ouro"])
def test_cache_equals_the_tensors_of_a_real_cache(family: str, mixers: str, length: int) -> None:
    model = tiny_model(tiny_spec(family), MIXERS[mixers], **SMALL)
    with torch.no_grad():
        cache = model(tokens(1, length), use_cache=True)[CACHE_NAME]
    facts = model_facts(model.config, cache_dtype=torch.float32)
    assert facts.cache_bytes(length) == stored_bytes(cache)


def test_growth_and_constant_part_add_up_for_long_contexts() -> None:
    facts = model_facts(LT2Config.from_spec(tiny_spec(), MIXERS["hybrid"], window_tokens=5))
    for context in (5, 64, 1000):
        grown = facts.constant_bytes + context * facts.cache_bytes_per_token
        assert facts.cache_bytes(context) == grown
        for layer in facts.layers:
            grown = layer.constant_bytes + layer.grows * context * layer.cache_bytes_per_token
            assert layer.cache_bytes(context) == grown


def test_without_short_convolution_there_is_no_history() -> None:
    spec = tiny_spec()
    facts = model_facts(LT2Config.from_spec(spec, MIXERS["linear"], short_conv=False))
    heads, width = spec.num_attention_heads, spec.head_dim
    assert facts.constant_bytes == NUM_LAYERS * heads * width * width * 4


def test_ouro_1_4b_has_its_published_size_and_cache() -> None:
    facts = model_facts(LT2Config.from_spec(ouro_1_4b()))
    assert facts.parameters == 1_434_652_673
    assert facts.cache_bytes_per_token == 768 * 1024
    assert facts.constant_bytes == 0
    assert [layer.visits for layer in facts.layers] == [4] * 24


def test_prelude_and_coda_run_once() -> None:
    spec = tiny_spec(num_loops=3)
    facts = model_facts(LT2Config.from_spec(spec, prelude_layers=1, coda_layers=1))
    assert [layer.visits for layer in facts.layers] == [1, 3, 1]


def test_plain_form_holds_every_layer() -> None:
    plain = model_facts(LT2Config.from_spec(tiny_spec(), MIXERS["hybrid"])).to_dict()
    assert [layer["mixer"] for layer in plain["layers"]] == MIXERS["hybrid"]
    assert plain["cache_bytes_per_token"] > 0
