"""Huginn and Nanbeige against independent implementations, from checkpoints as published."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import recurrent_oracles as oracle
import torch

from ltconvert.convert.checkpoint import load_student, save_student
from ltconvert.convert.decoding import Decoder
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.injection import SEED
from ltconvert.convert.students.lt2 import LT2Config, LT2ForCausalLM
from ltconvert.convert.teachers.load import empty_model, load_teacher
from ltconvert.convert.teachers.registry import FAMILIES
from ltconvert.convert.transfer import build_student
from ltconvert.errors import UserError

TOLERANCE = 1e-4
IDS = torch.randint(3, 97, (2, 21), generator=torch.Generator().manual_seed(5))


def first_states(config: dict[str, Any]) -> torch.Tensor:
    """A draw of Huginn's first states by position: normal, cut off at three deviations, [T, C]."""
    width = config["n_embd"]
    std = (2 / (5 * width)) ** 0.5
    generator = torch.Generator().manual_seed(SEED)
    uniform = torch.rand(config["block_size"], width, dtype=torch.float64, generator=generator)
    normal = NormalDist()
    least, most = normal.cdf(-3), normal.cdf(3)
    states = std * uniform.apply_(lambda u: normal.inv_cdf(least + u * (most - least)))
    assert states.abs().max() < 3 * std and 0.93 < states.std() / std < 1.04  # 0.987 of many
    return states[: IDS.shape[1]].float() * width**0.5


def huginn(folder: Path, loops: int) -> tuple[LT2ForCausalLM, torch.Tensor]:
    """The loaded model and the oracle's logits of IDS."""
    config = oracle.TINY_HUGINN | {"mean_recurrence": loops}
    weights = oracle.write_checkpoint(folder, config)
    return load_teacher(str(folder)).model, oracle.huginn(
        weights, config, IDS, first_states(config)
    )


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_huginn_is_the_oracle(loops: int, tmp_path: Path) -> None:
    model, expected = huginn(tmp_path, loops)
    assert expected.std() > 0.5
    with torch.no_grad():
        found = model(IDS)
        assert (found.logits - expected).abs().max() < TOLERANCE
        cache = model.new_cache()
        assert len(cache.layers) == 2 * loops + 2 and len(found.loop_states) == loops
        pieces = [model(x, cache=cache).logits for x in (IDS[:, :9], *IDS[:, 9:].split(4, 1))]
    assert (torch.cat(pieces, 1) - expected).abs().max() < TOLERANCE


def test_huginn_padded_packed_decoded_and_reloaded(tmp_path: Path) -> None:
    model, expected = huginn(tmp_path, 3)
    mask = torch.ones(2, 25, dtype=torch.long)
    mask[:, :4] = 0
    with torch.no_grad():
        padded = torch.cat([IDS[:, :4], IDS], 1)
        found = model(padded, attention_mask=mask).logits[:, 4:]
        assert (found - expected).abs().max() < TOLERANCE
        twice = torch.cat([IDS, IDS], 1)
        segments = (torch.arange(42) >= 21).int().repeat(2, 1)
        found = model(twice, segment_ids=segments).logits
        assert (found - torch.cat([expected, expected], 1)).abs().max() < TOLERANCE
        save_student(model, None, tmp_path / "student", {})
        again = load_student(tmp_path / "student")
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        plain = model.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(Decoder(again, 2, 30).generate(IDS, max_new_tokens=8), plain[:, 21:])


@pytest.mark.parametrize("mixers", [["full"] * 4, ["full", "window", "gdn_window", "window"]])
def test_a_student_of_huginn_starts_as_its_teacher(mixers: list[str], tmp_path: Path) -> None:
    """A window that covers the row is full attention."""
    model, expected = huginn(tmp_path, 2)
    student = build_student(model, mixers, {"window_tokens": 21, "loop_residual": True})
    with torch.no_grad():
        assert (student(IDS).logits - expected).abs().max() < TOLERANCE


def test_published_huginn_has_the_size_of_its_files() -> None:
    """15.65 GB in fp32, the tied head stored; every tensor has a place and none is left over."""
    shapes = oracle.huginn_shapes(oracle.HUGINN)
    assert round(4 * sum(torch.Size(s).numel() for s in shapes.values()) / 1e9, 2) == 15.65
    family = FAMILIES["huginn_raven"]
    spec = family.read_spec(oracle.HUGINN)
    assert (spec.num_loops, spec.head_dim, spec.embedding_scale) == (32, 96, 5280**0.5)
    expected = {n: v.shape for n, v in empty_model(LT2Config.from_spec(spec)).state_dict().items()}
    found = {
        name: value.shape
        for published, shape in shapes.items()
        for name, value in family.read(oracle.HUGINN, published, torch.empty(shape, device="meta"))
    }
    assert found == expected


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("loops", [1, 2, 3])
def test_nanbeige_is_the_oracle(loops: int, skip: bool, tmp_path: Path) -> None:
    config = oracle.TINY_NANBEIGE | {"num_loops": loops, "skip_loop_final_norm": skip}
    weights = oracle.write_checkpoint(tmp_path, config)
    expected = oracle.nanbeige(weights, config, IDS)
    model = load_teacher(str(tmp_path)).model
    with torch.no_grad():
        assert (model(IDS).logits - expected).abs().max() < TOLERANCE
        cache = model.new_cache()
        pieces = [model(x, cache=cache).logits for x in (IDS[:, :9], *IDS[:, 9:].split(4, 1))]
    assert len(cache.layers) == 3 * loops
    assert (torch.cat(pieces, 1) - expected).abs().max() < TOLERANCE


def test_published_nanbeige_has_its_size() -> None:
    """8.34 GB in bf16; heads are wider than the hidden width divided by their number."""
    spec = FAMILIES["nanbeige"].read_spec(oracle.NANBEIGE)
    facts = model_facts(LT2Config.from_spec(spec))
    sizes = oracle.nanbeige_shapes(oracle.NANBEIGE).values()
    assert facts.parameters == sum(torch.Size(s).numel() for s in sizes)
    assert round(2 * facts.parameters / 1e9, 2) == 8.34
    assert (spec.num_loops, spec.loop_norm, spec.head_dim) == (2, "every", 128)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (oracle.NANBEIGE, {"loop_share_kv": True}, "switches on loop_share_kv"),
        (oracle.NANBEIGE, {"num_loops": -1}, "num_loops is -1"),
        (oracle.HUGINN, {"state_init": "zero"}, "state_init of this huginn_raven config is 'zero'"),
        (oracle.HUGINN, {"num_key_value_heads": 8}, "num_key_value_heads"),
        (oracle.HUGINN, {"n_layers_in_coda": 0}, "2, 4, 0; each must be above 0"),
    ],
)
def test_variants_that_are_not_computed_are_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        FAMILIES[config["model_type"]].read_spec(config | changes)
    assert "\n" not in str(caught.value)
