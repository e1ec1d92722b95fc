"""Pools with fewer entries: those that stay are what they were, merged ones are means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dreamer_case import released
from helpers import FAMILIES, tiny_model, tiny_spec, tokens

from ltconvert.convert.checkpoint import load_student, save_student
from ltconvert.convert.dropping import drop_layers
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.dreamer.router import Router
from ltconvert.convert.students.dreamer.shrink import (
    Cut,
    choose,
    likeness,
    nulls_in_place_of,
    set_top_experts,
    shrink,
)
from ltconvert.convert.students.static_cache import StaticCache
from ltconvert.convert.transfer import build_student
from ltconvert.errors import UserError


def whole(size: int) -> Cut:
    return Cut(tuple((i,) for i in range(size)), ((1.0,),) * size)


def whole_but(size: int, count: int) -> Cut:
    """What is left when some, whichever, leave."""
    return choose(torch.rand(3, size), torch.eye(size), size - count)


def without(layers: list[int], count: int, slices: int) -> Cut:
    """What is left when all entries of some layers leave."""
    stay = [(i,) for i in range(count * slices) if i // slices not in layers]
    return Cut(tuple(stay), ((1.0,),) * len(stay))


def test_the_least_used_leave() -> None:
    effect_DE = torch.tensor([[5.0, 0.0, 1.0, 2.0], [0.0, 0.5, 1.0, 2.0]])
    cut = choose(effect_DE, torch.eye(4), 2)
    assert cut == Cut(((0,), (3,)), ((1.0,), (1.0,)))


def test_others_enter_the_entry_most_like_them() -> None:
    # 1 serves 3's depth; 2 serves both alike, and its parameters are those of 0.
    effect_DE = torch.tensor([[6.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.5, 3.0]])
    alike = torch.eye(4)
    alike[2, 0] = alike[0, 2] = 0.9
    cut = choose(effect_DE, alike, 2, "merge")
    assert cut.groups == ((0, 2), (3, 1))
    assert cut.shares == ((pytest.approx(6 / 7), pytest.approx(1 / 7)), (0.75, 0.25))
    unused = choose(torch.zeros(2, 2), torch.eye(2), 1, "merge")
    assert unused == Cut(((0, 1),), ((0.5, 0.5),))


def test_likeness_is_the_cosine_of_all_parameters() -> None:
    pool = released(slices=2).model.dreamer.experts
    flat = torch.cat([p.detach().flatten(1) for p in pool.parameters()], dim=1)
    wanted = torch.nn.functional.cosine_similarity(flat[:, None], flat[None], dim=-1)
    torch.testing.assert_close(likeness(pool), wanted)


def test_what_nobody_chooses_can_leave() -> None:
    student, ids = released(), tokens(2, 9)
    layer = student.model.dreamer
    with torch.no_grad():
        for router in (layer.attention_router, layer.expert_router):
            router.depth_logits[:, 1] = -1e4
        before = student(ids).logits
        cut = Cut(((0,), (2,)), ((1.0,), (1.0,)))
        shrink(student, cut, cut)
        torch.testing.assert_close(student(ids).logits, before, atol=1e-5, rtol=1e-5)
    assert student.config.dreamer["entries"] == student.config.dreamer["experts"] == 2


def test_equal_experts_merge_into_one_of_them() -> None:
    """With two of two chosen and equal experts, their mean has the weight of both."""
    student = released(top_experts=2, top_entries=2)
    layer, ids = student.model.dreamer, tokens(2, 9)
    with torch.no_grad():
        for pool, router in (
            (layer.attention, layer.attention_router),
            (layer.experts, layer.expert_router),
        ):
            for parameter in pool.parameters():
                parameter[2] = parameter[1]
            router.balance[0] = -1e4
        before = student(ids).logits
        pair = Cut(((0,), (1, 2)), ((1.0,), (0.3, 0.7)))
        shrink(student, pair, pair)
        for router in (layer.attention_router, layer.expert_router):
            router.top = 1
            router.balance.copy_(torch.tensor([-1e4, 0.0]))
        torch.testing.assert_close(student(ids).logits, before, atol=1e-4, rtol=1e-4)


def test_a_merged_entry_is_the_mean_and_as_welcome_as_its_parts() -> None:
    student = released()
    layer = student.model.dreamer
    down = layer.experts.down.weight.detach().clone()
    keys = layer.expert_router.keys.detach().clone()
    depth = layer.expert_router.depth_logits.detach().clone()
    shrink(student, whole(3), Cut(((0, 2), (1,)), ((0.75, 0.25), (1.0,))))
    torch.testing.assert_close(layer.experts.down.weight[0], 0.75 * down[0] + 0.25 * down[2])
    assert torch.equal(layer.experts.down.weight[1], down[1])
    torch.testing.assert_close(layer.expert_router.keys[0], 0.75 * keys[0] + 0.25 * keys[2])
    assert torch.equal(layer.expert_router.depth_logits[:, 0], depth[:, [0, 2]].amax(1))


@pytest.mark.parametrize("family", [*FAMILIES, "outer"])
@pytest.mark.parametrize(("slices", "skip"), [(1, False), (4, False), (4, True)])
def test_a_depth_whose_entries_left_is_a_layer_that_was_dropped(
    family: str, slices: int, skip: bool
) -> None:
    """Where as many are chosen as a layer has, nulls are all that is chosen there."""
    layout = {"norm_layout": "outer"} if family == "outer" else {}
    teacher, ids = tiny_model(tiny_spec("llama" if layout else family, **layout)), tokens(2, 9)
    layers, gone = teacher.config.num_layers, 1
    sizes = {"top_entries": 1, "top_experts": slices, "slices": slices, "shared_size": 16}
    pools = {"entries": layers, "experts": layers * slices}
    with torch.random.fork_rng():
        student = build_student(teacher, ["full"] * layers, {"dreamer": sizes | pools})
    config = student.model.dreamer.config
    assert config.null_entries == config.null_experts == 0
    student.model.dreamer.set_release(1.0)
    shrink(student, *(without([gone], layers, size) for size in (1, slices)), skip=skip)
    assert student.config.dreamer["null_experts"] == slices
    depths = [depth for depth, step in enumerate(teacher.model.schedule) if step.layer == gone]
    for branch in ("skipped_attention", "skipped_experts"):
        assert student.config.dreamer[branch] == (depths if skip else [])
    with torch.no_grad():
        wanted = drop_layers(teacher, [gone])(ids).logits
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-4, rtol=0)


def test_a_depth_without_a_slice_keeps_the_others_at_their_weight() -> None:
    student = released(slices=2, depth_heads=0, shared_size=0)
    layer = student.model.dreamer
    layer.expert_router.keys.data.zero_()
    layer.expert_router.top = 2
    shrink(student, whole(3), Cut(((0,), (1,), (2,), (4,)), ((1.0,),) * 4))  # 3 and 5 leave
    h_NC = torch.randn(5, layer.spec.hidden_size)
    for depth, (own, null) in enumerate(((None, 0.0), (2, 1.0), (3, 1.0))):
        routes = layer.expert_router(h_NC, depth)
        torch.testing.assert_close(routes.weights_NK.sum(-1), torch.full((5,), 2.0))
        of_nulls = routes.weights_NK * (routes.chosen_NK >= 4)
        torch.testing.assert_close(of_nulls.sum(-1), torch.full((5,), null))
        assert own is None or bool((routes.chosen_NK == own).any(-1).all())


def test_a_null_takes_the_logits_of_what_left_where_they_are_higher() -> None:
    router = Router(4, 5, [0, 1, 2], slices=2, top=2, select_by="logits")
    with torch.no_grad():
        router.keys.normal_()
        router.depth_logits.copy_(torch.arange(15.0).view(3, 5).flip(0))
        router.depth_logits[1] *= -1
        keys, logits = nulls_in_place_of(router, [0, 3])
        assert not keys.any() and torch.equal(logits, router.depth_logits[:, [0, 3]])
        keys, logits = nulls_in_place_of(router, [0, 3, 4])
    assert logits.tolist() == [[14.0, 13.0], [-5.0, -8.0], [4.0, 3.0]]


def test_nulls_learn_and_nothing_is_lost_to_them() -> None:
    student, ids = released("qwen2", slices=2), tokens(2, 11)
    shrink(student, without([1], 3, 1), without([1], 3, 2))
    student.double()(ids, labels=ids).loss.backward()
    layer = student.model.dreamer
    for router in (layer.attention_router, layer.expert_router):
        for gradient in (router.keys.grad[router.experts :], router.depth_logits.grad[:, -1]):
            assert bool(gradient.any())
    assert all(bool(p.grad.isfinite().all()) for p in student.parameters() if p.grad is not None)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2", "huginn"])
def test_a_shrunken_student_is_saved_and_decodes(tmp_path: Path, family: str, skip: bool) -> None:
    student, ids = released(family, slices=2), tokens(1, 9)
    gone = 0 if skip else 1  # that of the first depth is the cache's first layer
    pools = without([gone], 3, 1), without([1], 3, 2) if skip else whole_but(6, 2)
    shrink(student, *pools, skip=skip)
    assert (0 in student.config.dreamer["skipped_attention"]) == skip
    set_top_experts(student, 3)
    save_student(student, None, tmp_path, {})
    loaded = load_student(tmp_path)
    with torch.no_grad():
        wanted = student(ids).logits
        torch.testing.assert_close(loaded(ids).logits, wanted)
        cache = loaded.new_cache()
        steps = [loaded(ids[:, t : t + 1], cache=cache).logits for t in range(9)]
        packed = student(
            torch.cat([ids, ids], dim=1), segment_ids=torch.tensor([[0] * 9 + [1] * 9])
        ).logits
    torch.testing.assert_close(torch.cat(steps, dim=1), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(packed[:, 9:], wanted, atol=1e-4, rtol=1e-4)


def test_what_is_skipped_takes_no_cache_and_no_weights() -> None:
    whole_one, student = released(slices=2), released(slices=2)
    shrink(student, without([1], 3, 1), without([2], 3, 2), skip=True)
    config, facts = student.config, model_facts(student.config)
    assert [config.attends(slot) for slot in range(3)] == [True, False, True]
    kept = [layer.cache_bytes(64) for layer in model_facts(whole_one.config).layers]
    assert [layer.cache_bytes(64) for layer in facts.layers] == [kept[0], 0, kept[2]]
    sizes = [StaticCache(x.config, 2, 64).nbytes for x in (student, whole_one)]
    assert sizes[0] < 0.7 * sizes[1]
    first, middle, last = facts.layers
    assert middle.mixer_parameters < first.mixer_parameters == last.mixer_parameters
    inside = [x.parameters - x.mixer_parameters for x in facts.layers]
    assert inside[2] < inside[0] == inside[1]


def test_a_window_that_is_skipped_needs_no_mask() -> None:
    model = released("gemma2").model
    windows = model.dreamer.windows
    assert model.windows() == set(windows) == {None, windows[0]}
    wide = [depth for depth, window in enumerate(windows) if window is None]
    assert released("gemma2", skipped_attention=wide).model.windows() == {windows[0]}


def test_a_branch_of_which_something_is_left_stays() -> None:
    student = released(slices=2)
    shrink(student, whole(3), Cut(((0,), (1,), (2,), (4,)), ((1.0,),) * 4), skip=True)
    assert student.config.dreamer["skipped_experts"] == []


def test_mistakes_are_refused() -> None:
    student = released(slices=2)
    with pytest.raises(UserError, match="no whole number of MLPs of 2"):
        shrink(student, whole(3), whole(5))
    with pytest.raises(UserError, match="the pool holds 1"):
        shrink(student, whole(1), whole(6))
    student.model.dreamer.set_release(0.5)
    with pytest.raises(UserError, match=r"released to 0\.50"):
        shrink(student, whole(3), whole(6))
