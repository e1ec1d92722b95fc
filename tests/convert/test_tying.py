"""A dense teacher as a looped model: exact at full rank, optimal below it, refused where unfit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens

from ltconvert.convert.inspect import model_facts
from ltconvert.convert.low_rank import RIDGE, low_rank
from ltconvert.convert.mixers.projection import Linear
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.students.merge import in_loop
from ltconvert.convert.teachers.spec import TeacherSpec
from ltconvert.convert.transfer import build_student, restore_full
from ltconvert.convert.tying import STARTS, tie_layers, tied_spec
from ltconvert.errors import UserError

DENSE = tuple(family for family in FAMILIES if family != "ouro")
MATRICES = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj", "mixer.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip


def deep(family: str = "llama", layers: int = 8, **changes: Any) -> TeacherSpec:
    """A prelude and a coda of one layer around a pattern of three that comes twice."""
    spec = tiny_spec(family)
    pattern = [(i - 1) % 3 if 0 < i < layers - 1 else 0 for i in range(layers)]
    return replace(
        spec,
        num_layers=layers,
        layer_windows=tuple(spec.layer_windows[i] for i in pattern),
        layer_rope=tuple(spec.layer_rope[i] for i in pattern),
        **changes,
    )


def tie(teacher: LT2ForCausalLM, **options: Any) -> LT2ForCausalLM:
    return tie_layers(teacher, **({"loops": 2, "prelude": 1, "coda": 1, "rank": 99} | options))


@pytest.mark.parametrize("start", list(STARTS))
@pytest.mark.parametrize("family", DENSE)
def test_at_full_rank_the_looped_model_is_its_teacher(family: str, start: str) -> None:
    spec = deep(family, o_bias=family == "qwen2", mlp_bias=family == "qwen2")
    teacher, ids = tiny_model(spec), tokens(2, 17)
    for dtype, tolerance in ((torch.float32, 5e-5), (torch.float64, 1e-11)):
        teacher = teacher.to(dtype)
        with torch.no_grad():
            looped = tie(teacher, start=start)
            error = (looped(ids).logits - teacher(ids).logits).abs().max()
        assert looped.config.num_layers == 5 and looped.config.num_loops == 2
        assert looped.config.num_hidden_layers == 8  # a cache slot for each of the teacher's layers
        assert float(error) < tolerance


@pytest.mark.parametrize(("loops", "prelude", "coda"), [(2, 0, 0), (4, 0, 0), (3, 2, 0), (6, 0, 2)])
def test_any_division_of_the_layers_is_exact(loops: int, prelude: int, coda: int) -> None:
    teacher, ids = tiny_model(deep()).double(), tokens(1, 9)
    with torch.no_grad():
        looped = tie(teacher, loops=loops, prelude=prelude, coda=coda)
        torch.testing.assert_close(looped(ids).logits, teacher(ids).logits, atol=1e-11, rtol=0)


def test_what_a_tied_matrix_starts_from_by_hand() -> None:
    """Core of 6 layers in 2 loops: tied are 0 and 3, 1 and 4, 2 and 5; evenly spaced 0, 2, 5."""
    teacher = tiny_model(deep())
    weights = [layer.mlp.up_proj.weight for layer in teacher.model.layers[1:7]]
    expected = {
        "average": [(weights[i] + weights[i + 3]) / 2 for i in range(3)],
        "lower": weights[:3],
        "stepwise": [weights[0], weights[round(2.5)], weights[5]],
    }
    for start, wanted in expected.items():
        looped = tie(teacher, start=start, rank=0)
        for layer, weight in zip(looped.model.layers[1:4], wanted, strict=True):
            torch.testing.assert_close(layer.mlp.up_proj.weight, weight)


@pytest.mark.parametrize("rank", [0, 3])
def test_vectors_are_each_loops_own_and_nothing_is_lost(rank: int) -> None:
    teacher = tiny_model(deep("qwen2", qk_norm="head"))
    looped = tie(teacher, rank=rank)
    for layer, own in enumerate(teacher.model.layers):
        loop = int(layer >= 4)
        place = looped.model.layers[layer if layer < 4 else layer - 3]
        if place.mixer.q_proj.loops > 1:
            place = in_loop(place, loop)
        for name, value in own.named_parameters():
            if value.dim() == 1:
                assert torch.equal(place.get_parameter(name), value), (layer, name)


def test_what_is_not_tied_is_the_teachers_memory() -> None:
    teacher = tiny_model(deep())
    looped = tie(teacher)
    pairs = [(0, 0), (4, 7)]
    for own, theirs in pairs:
        a, b = looped.model.layers[own], teacher.model.layers[theirs]
        assert a.mlp.up_proj.weight.data_ptr() == b.mlp.up_proj.weight.data_ptr()
    assert looped.lm_head.weight is looped.model.embed_tokens.weight
    assert not any(parameter.requires_grad for parameter in looped.parameters())


def test_a_tensor_without_a_place_is_an_error() -> None:
    teacher = tiny_model(deep())
    teacher.model.layers[2].mixer.register_parameter("sinks", torch.nn.Parameter(torch.ones(4)))
    with pytest.raises(ValueError, match=r"no place or no value for .*\.2\.mixer\.sinks"):
        tie(teacher)


@pytest.mark.parametrize("shape", [(7, 12), (12, 7), (9, 9)])
def test_low_rank_factors_reach_the_bound_of_eckart_and_young(shape: tuple[int, int]) -> None:
    """The error is the root of the sum of squares of the singular values left out."""
    matrix = torch.randn(shape, dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    whole_b, whole_a = low_rank(matrix, min(shape))
    for rank in range(1, min(shape) + 1):
        b, a = low_rank(matrix, rank)
        assert b.shape == (shape[0], rank) and a.shape == (rank, shape[1])
        error, tail = (matrix - b @ a).norm(), values[rank:].square().sum().sqrt()
        torch.testing.assert_close(error, tail, atol=1e-10, rtol=1e-10)
        # The first factors of a higher rank are those of a lower one.
        torch.testing.assert_close(whole_b[:, :rank] @ whole_a[:rank], b @ a)


@pytest.mark.parametrize("shape", [(7, 12), (12, 7)])
def test_factors_for_given_inputs_have_the_least_mean_square_error_there(
    shape: tuple[int, int],
) -> None:
    """Against the singular values of W times the inputs themselves, and against other matrices."""
    matrix = torch.randn(shape, dtype=torch.float64)
    inputs = torch.randn(50, shape[1], dtype=torch.float64)
    inputs = inputs @ torch.randn(shape[1], shape[1], dtype=torch.float64)
    squares = inputs.mT @ inputs / 50
    # What the ridge stands for: further inputs, in every direction alike.
    more = (50 * RIDGE * squares.diagonal().mean()).sqrt() * torch.eye(shape[1]).double()
    seen = torch.cat([inputs, more])
    tails = torch.linalg.svdvals(seen @ matrix.mT)
    for rank in range(1, min(shape) + 1):
        b, a = low_rank(matrix, rank, squares)
        error = (seen @ (matrix - b @ a).mT).norm()
        tail = tails[rank:].square().sum().sqrt()
        torch.testing.assert_close(error, tail, atol=1e-9, rtol=1e-9)
        plain_b, plain_a = low_rank(matrix, rank)
        assert error <= (seen @ (matrix - plain_b @ plain_a).mT).norm() + 1e-9
    torch.testing.assert_close(b @ a, matrix, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("shape", [(7, 12), (12, 7)])
def test_a_step_of_the_factors_means_as_much_for_small_inputs_as_for_large(
    shape: tuple[int, int],
) -> None:
    """All values of B moved by one step move an output by no more than |x| times that and the rank.

    For rows of A of length 1 and no others, whatever x. The factors know nothing of the inputs'
    size, then; rows that whiten inputs would grow as these get smaller.
    """
    matrix = torch.randn(shape, dtype=torch.float64)
    spread = torch.logspace(0, -3, shape[1], dtype=torch.float64)
    squares = torch.cov(spread[:, None] * torch.randn(shape[1], 60, dtype=torch.float64))
    for read in (None, squares, 1e-8 * squares):
        b, a = low_rank(matrix, 4, read)
        torch.testing.assert_close(a.norm(dim=1), torch.ones(4, dtype=torch.float64))
        if read is not None:
            known_b, known_a = low_rank(matrix, 4, squares)
            torch.testing.assert_close(a, known_a)
            torch.testing.assert_close(b, known_b)


@pytest.mark.parametrize("squares", [None, torch.eye(4).double()])
def test_factors_of_nothing_can_learn(squares: torch.Tensor | None) -> None:
    b, a = low_rank(torch.zeros(6, 4, dtype=torch.float64), 2, squares)
    assert not (b @ a).any() and (b.any() or a.any())  # else both gradients are 0 for ever


@pytest.mark.parametrize("start", list(STARTS))
def test_the_error_of_every_matrix_falls_with_the_rank_along_its_singular_values(
    start: str,
) -> None:
    teacher = tiny_model(deep()).double()
    shared = tie(teacher, start=start, rank=0).model.layers
    last: dict[tuple[int, str], float] = {}
    for rank in (1, 4, 12, 24, 32):
        looped = tie(teacher, start=start, rank=rank)
        for layer in range(1, 7):
            index, loop = 1 + (layer - 1) % 3, (layer - 1) // 3
            for name in MATRICES:
                wanted = teacher.model.layers[layer].get_submodule(name).weight
                linear: Any = looped.model.layers[index].get_submodule(name)
                error = float((wanted - linear.weight_in(loop)).detach().norm())
                base: Any = shared[index].get_submodule(name)
                tail = (
                    torch.linalg.svdvals(wanted - base.weight)[rank:].square().sum().sqrt().detach()
                )
                assert error == pytest.approx(float(tail), abs=1e-9)
                assert error <= last.get((layer, name), 1e9) + 1e-9
                last[layer, name] = error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loops": 4}, "leave 6, which student.loops 4 does not divide; keep 4 layers outside the "
         "core, or loop 2, 3, 6 times"),
        ({"loops": 2, "prelude": 5, "coda": 3}, "leave 0, which .* keep fewer layers outside"),
        ({"loops": 6, "prelude": 4, "coda": 2}, "leave 2, which student.loops 6 does not divide"),
    ],
)  # fmt: skip
def test_layers_that_do_not_divide_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        tie(tiny_model(deep()), **options)
    assert "\n" not in str(caught.value)


def test_layers_of_other_kinds_are_not_tied() -> None:
    with pytest.raises(UserError, match=r"layers 0 and 3 would be tied .* windows 7 and None"):
        tie(tiny_model(deep("gemma3")), loops=2, prelude=0, coda=2)
    with pytest.raises(
        UserError, match=r"layers 0 and 2 would be tied .* positions default and None"
    ):
        tied_spec(deep("smollm3"), loops=4, prelude=0, coda=0, rank=0)


def test_a_looped_teacher_is_not_looped_again() -> None:
    with pytest.raises(UserError, match="runs 4 loops already"):
        tie(tiny_model(tiny_spec("ouro")), prelude=0, coda=0)


def test_sizes_by_hand() -> None:
    spec = deep(hidden_size=32, intermediate_size=48)
    facts = model_facts(tie(tiny_model(spec), rank=5).config)
    inputs_and_outputs = 32 + 48 + 2 * (32 + 24) + 48 + 32 + 3 * (32 + 48)
    own = 2 * (5 * inputs_and_outputs + 2 * 32)  # corrections and two norms, two loops
    plain = model_facts(tie(tiny_model(spec), rank=0).config)
    layer = facts.layers[1]
    assert layer.own_parameters == own and layer.visits == 2
    assert facts.own_parameters == 3 * own
    assert plain.layers[1].own_parameters == 2 * 2 * 32
    assert layer.visited[0] == layer.parameters - own // 2
    assert facts.layers[0].own_parameters == 0 == facts.layers[4].own_parameters


@pytest.mark.parametrize("family", DENSE)
def test_a_layer_in_one_loop_is_the_plain_layer_of_that_loop(family: str) -> None:
    teacher = tiny_model(deep(family)).double()
    looped = tie(teacher).model
    for layer in range(1, 7):
        plain = in_loop(looped.layers[1 + (layer - 1) % 3], (layer - 1) // 3)
        own = dict(plain.named_parameters())
        assert not [m for m in plain.modules() if isinstance(m, Linear) and (m.rank or m.loops > 1)]
        for name, value in teacher.model.layers[layer].named_parameters():
            torch.testing.assert_close(own[name], value, atol=1e-12, rtol=0)


@pytest.mark.parametrize("family", DENSE)
def test_layers_of_a_looped_model_are_converted_and_restored_in_all_loops(family: str) -> None:
    teacher, ids = tiny_model(deep(family)).double(), tokens(2, 11)
    looped = tie(teacher)
    x_BTC = torch.randn(1, 6, 32, dtype=torch.float64)
    with torch.no_grad():
        student = build_student(looped, ["full", "gdn", "gdn", "gdn", "gdn"])
        mixer: Any = student.model.layers[2].mixer
        source: Any = looped.model.layers[2].mixer
        for loop in range(2):  # heads are repeated whole, each loop's own part too
            q, k, v = source.project(x_BTC, loop)
            q2, k2, v2 = mixer.project(x_BTC, loop)
            torch.testing.assert_close(q2, q)
            for head in range(4):
                torch.testing.assert_close(k2[:, :, head], k[:, :, head // 2])
                torch.testing.assert_close(v2[:, :, head], v[:, :, head // 2])
        assert not torch.allclose(student(ids).logits, teacher(ids).logits, atol=1e-2)
        restore_full(student, looped, range(5))
        torch.testing.assert_close(student(ids).logits, teacher(ids).logits, atol=1e-9, rtol=0)


def test_a_correction_starts_as_nothing_in_a_model_from_scratch() -> None:
    config = tie(tiny_model(deep()), rank=3).config
    torch.manual_seed(0)
    model = LT2ForCausalLM(config)
    layers = [m for m in model.modules() if isinstance(m, Linear) and m.rank]
    assert layers and all(torch.equal(m.weight_in(0), m.weight_in(1)) for m in layers)
    assert all(m.lora_a.any() for m in layers)


def test_factors_are_named_as_adapters_are() -> None:
    names = tie(tiny_model(deep()), rank=3).state_dict()
    factors = [name for name in names if re.search(r"lora_[ab]$", name)]
    assert len(factors) == 3 * 7 * 2
