"""Ouro against an independent implementation, from a checkpoint in the published format."""

from __future__ import annotations

import json
from pathlib import Path

import ouro_oracle
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2Config, exit_probabilities
from ltconvert.convert.teachers import ouro
from ltconvert.convert.teachers.load import (
    describe_teacher,
    empty_model,
    load_teacher,
)

TOLERANCE = 1e-4
IDS = torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_logits_states_and_exits_equal_the_oracle(loops: int, tmp_path: Path) -> None:
    config = ouro_oracle.tiny_config(loops)
    weights = ouro_oracle.write_checkpoint(tmp_path, config)
    logits, states, exits = ouro_oracle.forward(weights, config, IDS)
    assert logits.std() > 0.5
    teacher = load_teacher(str(tmp_path))
    assert teacher.spec.num_loops == loops
    with torch.no_grad():
        found = teacher.model(IDS)
    assert (found.logits - logits).abs().max() < TOLERANCE
    assert len(found.loop_states) == loops
    for ours, theirs in zip(found.loop_states, states, strict=True):
        assert (ours - theirs).abs().max() < TOLERANCE
    probabilities = exit_probabilities(found.exit_logits)
    assert (probabilities - exits).abs().max() < 1e-5
    assert (probabilities.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_cached_equals_uncached(loops: int, tmp_path: Path) -> None:
    config = ouro_oracle.tiny_config(loops)
    weights = ouro_oracle.write_checkpoint(tmp_path, config)
    logits, _, exits = ouro_oracle.forward(weights, config, IDS)
    model = load_teacher(str(tmp_path)).model
    cache = model.new_cache()
    assert len(cache.layers) == loops * config["num_hidden_layers"]
    with torch.no_grad():
        outputs = [
            model(chunk, cache=cache, use_cache=True)
            for chunk in (IDS[:, :8], *IDS[:, 8:].split(1, dim=1))
        ]
    assert (torch.cat([o.logits for o in outputs], 1) - logits).abs().max() < TOLERANCE
    gates = torch.cat([o.exit_logits for o in outputs], 1)
    assert (exit_probabilities(gates) - exits).abs().max() < 1e-5


def test_batch_with_left_padding_equals_single(tmp_path: Path) -> None:
    config = ouro_oracle.tiny_config(3)
    weights = ouro_oracle.write_checkpoint(tmp_path, config)
    model = load_teacher(str(tmp_path)).model
    mask = torch.ones_like(IDS)
    mask[0, :6] = 0
    with torch.no_grad():
        found = model(IDS, attention_mask=mask).logits
    alone, _, _ = ouro_oracle.forward(weights, config, IDS[:1, 6:])
    assert (found[:1, 6:] - alone).abs().max() < TOLERANCE


def test_published_1_4b_names_and_sizes() -> None:
    """All 269 tensors have a place, none is left over; checked on the meta device."""
    published = ouro_oracle.shapes(ouro_oracle.OURO_1_4B)
    assert len(published) == 269
    family = ouro.FAMILIES["ouro"]
    spec = family.read_spec(ouro_oracle.OURO_1_4B)
    expected = {
        name: tuple(v.shape)
        for name, v in empty_model(LT2Config.from_spec(spec)).state_dict().items()
    }
    assert {family.rename(name): shape for name, shape in published.items()} == expected
    assert {family.publish(name) for name in expected} == set(published)
    assert model_facts(LT2Config.from_spec(spec)).parameters == 1_434_652_673


def test_published_2_6b_size() -> None:
    config = {
        **ouro_oracle.OURO_1_4B,
        "num_hidden_layers": 48,
        "layer_types": ["full_attention"] * 48,
    }
    assert len(ouro_oracle.shapes(config)) == 533
    assert model_facts(LT2Config.from_spec(ouro.read_ouro(config))).parameters == 2_667_974_657


def test_published_config_round_trip() -> None:
    spec = ouro.read_ouro(ouro_oracle.OURO_1_4B)
    written = ouro.published_config(spec)
    assert ouro.read_ouro(written) == spec
    for key in ("rope_theta", "rope_scaling", "total_ut_steps", "head_dim", "vocab_size"):
        assert written[key] == ouro_oracle.OURO_1_4B[key]


def test_special_ids_and_template(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """The config calls id 0 everything; a chat turn ends with 2, padding is 0."""
    ouro_oracle.write_checkpoint(tmp_path, ouro_oracle.tiny_config(2))
    bare = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<|endoftext|>"
    )
    bare.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    teacher = load_teacher(str(tmp_path))
    generation = teacher.model.generation_config
    assert generation.eos_token_id == [2, 0]
    assert generation.pad_token_id == 0
    turns = [{"role": "user", "content": "Hi"}]
    text = teacher.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_of_its_own_stays(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    ouro_oracle.write_checkpoint(tmp_path, ouro_oracle.tiny_config(1))
    own = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    own.chat_template = "{{ messages[0]['content'] }}!"
    own.save_pretrained(tmp_path)
    tokenizer = load_teacher(str(tmp_path)).tokenizer
    turns = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "Hi!"


def test_describe_counts_a_cache_slot_a_loop(tmp_path: Path) -> None:
    ouro_oracle.write_checkpoint(tmp_path, ouro_oracle.tiny_config(3))
    _, facts = describe_teacher(str(tmp_path))
    assert facts["cache_bytes_per_token"] == 3 * 3 * 4 * 12 * 2 * 2
