"""Dreamers of students with windows or linear mixers: exact at the start, and right after it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from dreamer_case import released
from helpers import covering, diagonal, tiny_model, tiny_spec, tokens
from torch import Tensor

from ltconvert.convert.inspect import count, model_facts
from ltconvert.convert.students.dreamer.layer import DreamerPass
from ltconvert.convert.students.dreamer.pools import Depth, unit_rms
from ltconvert.convert.students.dreamer.shrink import Cut, shrink
from ltconvert.convert.students.dreamer.taken_over import KINDS, RECURRENT
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.distill.planning.footprint import footprint
from ltconvert.distill.planning.work import PRODUCTS
from ltconvert.kernels.chunkwise.spans import CHUNK_TOKENS

OTHERS = [kind for kind in KINDS if kind != "full"]
FAMILIES = ("llama", "gemma2", "ouro", "olmo2", "qwen2")  # norms in all places, a bias, loops
POOLS = {"entries": 3, "experts": 6, "slices": 2, "top_experts": 3, "shared_size": 16}


def teacher_of(family: str, kind: str, **options: Any) -> LT2ForCausalLM:
    """A student of three such layers, random in all of them, in fp64."""
    loops = {"num_loops": 2} if family == "ouro" else {}
    options = {"window_tokens": 5} | options
    return tiny_model(tiny_spec(family, **loops), [kind] * 3, **options).double()


def dreamer_of(teacher: LT2ForCausalLM, **options: Any) -> LT2ForCausalLM:
    return build_student(teacher, teacher.config.mixers, {"dreamer": POOLS, **options})


@pytest.mark.parametrize(("family", "kind"), diagonal(FAMILIES, OTHERS, each=3))
def test_it_starts_as_the_student_that_it_was_made_of(family: str, kind: str) -> None:
    teacher, ids = teacher_of(family, kind), tokens(2, 19)
    student = dreamer_of(teacher)
    with torch.no_grad():
        wanted = teacher(ids).logits
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-9, rtol=0)
        student.model.dreamer.set_release(1.0)
        assert (student(ids).logits - wanted).abs().max() > 1e-2
    theirs = {p.data_ptr() for p in teacher.parameters()}
    assert theirs.isdisjoint(p.data_ptr() for p in student.parameters())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("window", {"window_tokens": [3, 9]}),
        ("gdn", {"conv_size": 2, "loop_residual": True}),
        ("kda", {"short_conv": False}),
        ("gdn_window", {"window_tokens": 2, "conv_size": None}),
    ],
)
def test_settings_of_the_mixers_are_the_teachers(kind: str, options: dict[str, Any]) -> None:
    """Whatever the recipe's defaults, which are those of ``build_student``."""
    teacher, ids = teacher_of("ouro", kind, **options), tokens(2, 19)
    student = dreamer_of(teacher)
    with torch.no_grad():
        wanted = teacher(ids).logits
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize(("kind", "family"), covering(RECURRENT, ("qwen3", "olmo2", "gemma2")))
def test_a_depth_whose_tokens_agree_is_a_mixer_of_mean_matrices(kind: str, family: str) -> None:
    """Keys start at 0: all tokens choose alike, and sums of products are products of sums."""
    student = dreamer_of(teacher_of(family, kind))
    layer, step = student.model.dreamer, student.model.schedule[1]
    layer.set_release(1.0)
    pool, h_BTC = layer.attention, torch.randn(2, 11, 32, dtype=torch.double)
    assert pool.qkv.weight.shape[1] % 16 == 0  # or grouped products would not take it
    context = student.model.context(h_BTC)
    with torch.no_grad():
        x_BTC = unit_rms(h_BTC, layer.spec.rms_norm_eps)
        routes = layer.attention_router(x_BTC.flatten(0, 1), step.slot)
        chosen_K, weights_K = routes.chosen_NK[0].tolist(), routes.weights_NK[0].double()
        assert len(chosen_K) == 2

        def mean(bank: Tensor) -> Tensor:
            return torch.einsum("k,k...->...", weights_K, bank[chosen_K])

        mixer = student.model.make_mixer(kind, step.layer).double()
        own = dict(pool.cores[step.layer].state_dict()) | {"o_proj.weight": mean(pool.o.weight)}
        for part, bank in pool.qkv.named_parameters():
            names = [f"{name}.{part}" for name in mixer.projections()]
            own |= dict(zip(names, mean(bank).split(pool.widths)[:-1], strict=True))
        if layer.spec.qk_norm:
            own |= {f"{n}.weight": mean(getattr(pool, n).weight) for n in ("q_norm", "k_norm")}
        missing, unexpected = mixer.load_state_dict(own, strict=False)
        assert not missing
        assert all(name.endswith("bias") for name in unexpected)  # zeros of those without
        visit = DreamerPass.of(layer).visit(step, context)
        mixture = visit.mixture(routes, layer.attention_router)
        at = Depth(step.layer, None, None)
        pool.post_norm = None  # what stands behind it is not the mixer's
        h_BTC, heads = torch.randn_like(x_BTC), partial(visit.heads, pool=pool, at=at)
        found = pool(h_BTC, x_BTC, mixture, heads) - h_BTC
        torch.testing.assert_close(found, mixer(x_BTC, context), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["kda", "gdn_window", "window"])
def test_everything_learns(kind: str) -> None:
    student, ids = released(kind=kind), tokens(2, 11)
    with torch.no_grad():
        student.model.dreamer.shared.down_proj.weight.normal_()
    student(ids, labels=ids).loss.backward()
    idle = {n for n, p in student.named_parameters() if p.grad is None or not p.grad.any()}
    assert idle == set()


@pytest.mark.parametrize("kind", ["mamba2", "window"])
def test_what_nobody_chooses_can_leave(kind: str) -> None:
    student, ids = released(kind=kind), tokens(2, 9)
    layer = student.model.dreamer
    for router in (layer.attention_router, layer.expert_router):
        router.depth_logits.data[:, 1] = -1e4
    cores = {n: p.clone() for n, p in layer.named_parameters() if ".cores." in n}
    assert bool(cores) == (kind != "window")
    with torch.no_grad():
        before = student(ids).logits
        cut = Cut(((0,), (2,)), ((1.0,), (1.0,)))
        shrink(student, cut, cut)
        torch.testing.assert_close(student(ids).logits, before, atol=1e-5, rtol=1e-5)
    for name, value in cores.items():  # a depth's own: all three stay
        assert torch.equal(layer.get_parameter(name), value)


@pytest.mark.parametrize("kind", OTHERS)
def test_its_facts_are_those_of_its_layers(kind: str) -> None:
    """Caches as the teacher's; a token meets its entries' matrices and one depth's own numbers."""
    teacher = teacher_of("llama", kind)
    student = dreamer_of(teacher)
    facts, wanted = model_facts(student.config), model_facts(teacher.config)
    assert facts.parameters == count(student) - student.lm_head.weight.numel()
    for tokens_ in (3, 100):
        assert facts.cache_bytes(tokens_) == wanted.cache_bytes(tokens_)
    layer = student.model.dreamer
    used = sum(p[:2].numel() for part in layer.attention.parts() for p in part.parameters())
    if kind in RECURRENT:
        used += sum(p.numel() for p in layer.attention.cores[1].parameters())
    used += sum(p.numel() for p in layer.depth.parameters())
    used += layer.attention_router.keys.numel()
    assert facts.layers[1].mixer_parameters == used
    assert facts.layers[1].mixer == kind
    cost = footprint(facts, teacher.model.spec, 64)
    attended = 4 * 48 * (min(32, 5) if kind in ("window", "gdn_window") else 0)
    within, across = PRODUCTS.get(kind, (0, 0))
    attended += 48 * (within * CHUNK_TOKENS + 2 * across * 12)
    attended += 4 * 12 * layer.config.depth_heads  # of three depths on average one other is seen
    assert cost.flops == pytest.approx(2 * cost.active_parameters + 3 * attended)


@pytest.mark.parametrize(
    ("mixers", "named"),
    [
        (["dsa"] * 3, "dsa"),
        (["nsa"] * 3, "nsa"),
        (["moda"] * 3, "moda"),
        (["gdn", "full", "gdn"], "full and gdn"),
        (["gdn", "kda", "gdn"], "gdn and kda"),
    ],
)
def test_other_mixers_are_refused(mixers: list[str], named: str) -> None:
    teacher = tiny_model(tiny_spec(), mixers)
    with pytest.raises(ValueError, match=f"cannot be made of {named} layers; its teacher has the"):
        dreamer_of(teacher)


def test_a_residual_of_loops_stays_and_output_gates_are_refused() -> None:
    teacher, ids = teacher_of("ouro", "full", loop_residual=True), tokens(1, 9)
    with torch.no_grad():
        torch.testing.assert_close(dreamer_of(teacher)(ids).logits, teacher(ids).logits)
    with pytest.raises(ValueError, match=r"output gates \(student\.sdpa_gate\)"):
        dreamer_of(teacher_of("llama", "full", sdpa_gate=True))


def test_mixers_that_the_teacher_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['gdn', 'gdn', 'gdn'\] needs a teacher that has them"):
        build_student(tiny_model(tiny_spec()), ["gdn"] * 3, {"dreamer": POOLS})
