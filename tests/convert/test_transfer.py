"""Weights pass from teacher to student whole: heads, biases, norms, and nothing lost on the way."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens

from ltconvert.convert.transfer import (
    build_student,
    new_tensors,
    restore_full,
    student_options,
    swapped,
)
from ltconvert.recipes.student import StudentSettings

NEW_IN_GDN = {
    "a_proj.weight",
    "b_proj.weight",
    "gate_proj.weight",
    "log_rate",
    "rate_bias",
    "out_norm_weight",
}
NEW_IN_OTHERS = {
    "deltanet": {"b_proj.weight"},
    "kda": {"b_proj.weight", "a_proj.weight", "decay_up.weight", "log_rate", "rate_bias"},
    "mamba2": {"a_proj.weight", "log_rate", "rate_bias", "skip"},
    "retnet": {"rate_bias"},
}


@pytest.mark.parametrize("mixers", [["gdn"] * 3, ["kda", "deltanet", "mamba2"], ["retnet"] * 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_linear_q_dot_k_is_the_teachers_before_rope_head_by_head(
    family: str, mixers: list[str]
) -> None:
    """Right values from the definition: query head h reads kv head h // (H / G)."""
    spec = tiny_spec(family)
    teacher = tiny_model(spec)
    student = build_student(teacher, mixers)
    x_BTC = torch.randn(2, 7, spec.hidden_size, generator=torch.Generator().manual_seed(3))
    group = spec.num_attention_heads // spec.num_key_value_heads
    for layer in range(3):
        with torch.no_grad():
            q, k, v = teacher.model.layers[layer].mixer.project(x_BTC)
            q2, k2, v2 = student.model.layers[layer].mixer.project(x_BTC)
        for head in range(spec.num_attention_heads):
            expected = q[:, :, head] @ k[:, :, head // group].transpose(1, 2)
            found = q2[:, :, head] @ k2[:, :, head].transpose(1, 2)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(v2[:, :, head], v[:, :, head // group], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_mixers_own_parts_are_new(family: str) -> None:
    teacher = tiny_model(tiny_spec(family))
    student = build_student(
        teacher, ["gdn", "full", "window"], {"sdpa_gate": True, "loop_residual": True}
    )
    expected = {f"model.layers.0.mixer.{name}" for name in (*NEW_IN_GDN, "conv.weight")}
    expected |= {"model.layers.1.mixer.gate_proj.weight", "model.loop_residual"}
    assert set(new_tensors(student, teacher)) == expected
    plain = build_student(teacher, ["gdn"] * 3, {"short_conv": False})
    assert {name.split("mixer.")[1] for name in new_tensors(plain, teacher)} == NEW_IN_GDN
    for kind, new in NEW_IN_OTHERS.items():
        other = build_student(teacher, [kind] * 3, {"short_conv": False})
        expected = new | {"gate_proj.weight", "out_norm_weight"}
        assert {name.split("mixer.")[1] for name in new_tensors(other, teacher)} == expected


def test_every_teacher_tensor_arrives_bit_for_bit() -> None:
    teacher = tiny_model(tiny_spec("ouro"))
    own = dict(build_student(teacher, ["gdn", "full", "window"]).named_parameters())
    for name, value in teacher.named_parameters():
        assert torch.equal(own[name], value), name


def test_sharing_is_memory_and_copying_is_not() -> None:
    teacher = tiny_model(tiny_spec("llama"))
    for share in (True, False):
        student = build_student(teacher, ["gdn", "full", "gdn"], share=share)
        pairs = [
            (student.model.layers[0].mlp.up_proj, teacher.model.layers[0].mlp.up_proj),
            (student.model.layers[1].mixer.q_proj, teacher.model.layers[1].mixer.q_proj),
            (student.model.embed_tokens, teacher.model.embed_tokens),
        ]
        assert all((a.weight.data_ptr() == b.weight.data_ptr()) is share for a, b in pairs)
        linear = student.model.layers[0].mixer.q_proj.weight
        assert linear.data_ptr() != teacher.model.layers[0].mixer.q_proj.weight.data_ptr()
        assert student.lm_head.weight is student.model.embed_tokens.weight


def test_a_student_as_teacher_keeps_its_residual_and_its_mixers_to_itself() -> None:
    options = {"loop_residual": True, "window_tokens": 5}
    spec = tiny_spec("ouro", num_loops=3)
    teacher, ids = tiny_model(spec, ["window", "full", "full"], **options), tokens(1, 9)
    with torch.no_grad():
        teacher.model.loop_residual.normal_()
        again = build_student(teacher, teacher.config.mixers, options, share=True)
        assert torch.equal(again(ids).logits, teacher(ids).logits)
        fewer = build_student(teacher, teacher.config.mixers, options | {"loops": 2})
        assert torch.equal(fewer.model.loop_residual, teacher.model.loop_residual[:2])
    windows = (model.model.layers[0].mixer.q_proj.weight for model in (teacher, again))
    assert len({weight.data_ptr() for weight in windows}) == 2  # the stage align trains it


@pytest.mark.parametrize("loops", [2, 4])
def test_a_restored_layer_is_full_in_every_loop(loops: int) -> None:
    """Its caches too; the student that was built with it full from the start is the same model."""
    teacher, ids = tiny_model(tiny_spec("ouro", num_loops=loops)), tokens(1, 11)
    student = build_student(teacher, ["gdn"] * 3)
    before = student(ids).logits
    restore_full(student, teacher, [1])
    by_slot = [["linear_attention", "full_attention"][slot % 3 == 1] for slot in range(3 * loops)]
    assert student.config.layer_types == by_slot
    calls: list[int] = []
    student.model.layers[1].mixer.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        found = student(ids).logits
        assert len(calls) == loops
        assert torch.equal(found, build_student(teacher, ["gdn", "full", "gdn"])(ids).logits)
        assert not torch.equal(found, before)
        cache = student.new_cache()
        pieces = [student(piece, cache=cache).logits for piece in ids.split(4, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), found, atol=1e-4, rtol=1e-4)


def test_a_tensor_without_a_place_is_an_error() -> None:
    teacher = tiny_model(tiny_spec("llama"))
    teacher.model.layers[1].mixer.register_parameter("sinks", torch.nn.Parameter(torch.ones(4)))
    with pytest.raises(ValueError, match=r"layer 1.*sinks"):
        build_student(teacher, ["gdn"] * 3)


def test_restoring_and_swapping_layers() -> None:
    teacher, ids = tiny_model(tiny_spec("ouro")), tokens(2, 13)
    student = build_student(teacher, ["gdn"] * 3)
    with torch.no_grad():
        expected = teacher(ids).logits
        mixer = student.model.layers[2].mixer
        with swapped(teacher, 2, mixer):
            assert not torch.allclose(teacher(ids).logits, expected, atol=1e-3)
        assert torch.equal(teacher(ids).logits, expected)
        restore_full(student, teacher, [0, 1, 2])
        assert torch.equal(student(ids).logits, expected)
    assert student.config.mixers == ["full"] * 3
    assert set(student.config.layer_types) == {"full_attention"}


def test_student_options_come_from_the_settings() -> None:
    spec = tiny_spec("ouro")
    options = student_options(spec, StudentSettings(loops=2, short_conv=False).model_dump())
    student = build_student(tiny_model(spec), ["gdn"] * 3, options)
    assert student.config.num_loops == 2 and student.config.conv_size is None
    with pytest.raises(ValueError, match=r"student\.loops is 5.*1 to 4"):
        student_options(spec, StudentSettings(loops=5).model_dump())
