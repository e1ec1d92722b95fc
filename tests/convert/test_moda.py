"""Mixture-of-depths students: the teacher at schedule 0, the published formula at schedule 1."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens
from torch import Tensor

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student

MODA = ["moda"] * 3


def student_of(teacher: LT2ForCausalLM, schedule: float, **options: object) -> LT2ForCausalLM:
    student = build_student(teacher, options.pop("mixers", MODA), options)  # type: ignore[arg-type]
    student.model.depth_schedule.fill_(schedule)
    return student


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loops", [1, 2, 4])
def test_it_starts_as_its_teacher(family: str, loops: int) -> None:
    teacher = tiny_model(tiny_spec(family, num_loops=loops))
    student, ids = build_student(teacher, MODA), tokens(2, 17)
    assert student.model.depth_schedule == 0
    with torch.no_grad():
        wanted = teacher(ids).logits
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-4, rtol=0)
        student.model.depth_schedule.fill_(1)
        assert (student(ids).logits - wanted).abs().max() > 1e-2


def turned(x: Tensor, position: int, frequencies: Tensor | None) -> Tensor:
    """RoPE of vectors [..., D] at one position, as products of complex numbers."""
    if frequencies is None:
        return x
    pairs = torch.complex(*x.chunk(2, dim=-1))
    pairs = pairs * torch.polar(torch.ones_like(frequencies), position * frequencies)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def by_definition(model: LT2ForCausalLM, ids: Tensor) -> Tensor:
    """Logits [T, V] of one row: one softmax over concatenated keys, one query and head at a time.

    Equation 6 of arXiv 2603.15619: keys of the sequence and of all earlier sublayers at the token.
    """
    inner, spec = model.model, model.model.spec
    h = inner.embed(ids)[0]
    left: list[tuple[Tensor, Tensor]] = []  # what sublayers left: keys, values [T, G, D]
    group = spec.num_attention_heads // spec.num_key_value_heads
    for step in inner.schedule:
        layer = inner.layers[step.layer]
        mixer = layer.mixer
        name = spec.layer_rope[step.layer]
        angles = None if name is None else inner._ropes[name].frequencies("cpu")[0].double()
        x = layer.mixer_input(h[None])
        q, k, v = (y[0] for y in mixer.project(x))
        out = torch.zeros_like(q)
        for t in range(len(h)):
            first = 0 if mixer.window is None else max(0, t - mixer.window + 1)
            for head in range(spec.num_attention_heads):
                g = head // group
                query = turned(q[t, head], t, angles)
                keys = [turned(k[s, g], s, angles) for s in range(first, t + 1)]
                keys += [turned(key[t, g], t, angles) for key, _ in left]
                values = [v[s, g] for s in range(first, t + 1)]
                values += [value[t, g] for _, value in left]
                scores = torch.stack(keys) @ query * spec.attention_scale
                if (cap := spec.attention_softcap) is not None:
                    scores = cap * torch.tanh(scores / cap)
                out[t, head] = scores.softmax(-1) @ torch.stack(values)
        left.append((k, v))
        h = h + layer.mixer_contribution(mixer.o_proj(out.flatten(1))[None])[0]
        x = layer.mlp_input(h[None])
        if layer.depth_proj is not None:
            key, value = layer.depth_proj(x)
            left.append((key[0], value[0]))
        h = h + layer.mlp_contribution(x)[0]
        if step.closes_loop and (spec.loop_norm == "every" or step is inner.schedule[-1]):
            h = inner.norm(h)
    return model.logits(h)


@pytest.mark.parametrize(
    ("family", "loops"),
    [("llama", 1), ("qwen2", 2), ("qwen3", 1), ("smollm3", 1), ("olmo2", 1), ("gemma2", 2),
     ("gemma3", 1), ("ouro", 3)],
)  # fmt: skip
def test_at_the_end_it_is_the_published_formula(family: str, loops: int) -> None:
    model = tiny_model(tiny_spec(family, num_loops=loops), MODA).double()
    model.model.depth_schedule.fill_(1)
    ids = tokens(1, 11)
    with torch.no_grad():
        wanted = by_definition(model, ids)
        torch.testing.assert_close(model(ids).logits[0], wanted, atol=1e-5, rtol=1e-5)
