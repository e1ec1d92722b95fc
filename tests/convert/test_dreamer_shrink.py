"""Pools with fewer entries: those that stay are what they were, merged ones are means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dreamer_case import released
from helpers import tokens

from ltconvert.convert.checkpoint import load_student, save_student
from ltconvert.convert.students.dreamer.shrink import Cut, choose, likeness, shrink
from ltconvert.errors import UserError


def whole(size: int) -> Cut:
    return Cut(tuple((i,) for i in range(size)), ((1.0,),) * size)


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
    for router in (layer.attention_router, layer.expert_router):
        router.balance[1] = -1e4
    with torch.no_grad():
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


def test_a_shrunken_student_is_saved_and_decodes(tmp_path: Path) -> None:
    student, ids = released(slices=2), tokens(1, 9)
    shrink(student, Cut(((0,), (2,)), ((1.0,),) * 2), choose(torch.rand(3, 6), torch.eye(6), 4))
    save_student(student, None, tmp_path, {})
    loaded = load_student(tmp_path)
    with torch.no_grad():
        wanted = student(ids).logits
        torch.testing.assert_close(loaded(ids).logits, wanted)
        cache = loaded.new_cache()
        steps = [loaded(ids[:, t : t + 1], cache=cache).logits for t in range(9)]
    torch.testing.assert_close(torch.cat(steps, dim=1), wanted, atol=1e-5, rtol=1e-5)


def test_mistakes_are_refused() -> None:
    student = released(slices=2)
    with pytest.raises(UserError, match="no whole number of MLPs of 2"):
        shrink(student, whole(3), whole(5))
    with pytest.raises(UserError, match="the pool holds 1"):
        shrink(student, whole(1), whole(6))
    student.model.dreamer.set_release(0.5)
    with pytest.raises(UserError, match=r"released to 0\.50"):
        shrink(student, whole(3), whole(6))
