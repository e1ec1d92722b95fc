"""Window, chosen blocks and the rest: one softmax, which is the teacher's where it is complete."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens
from torch import Tensor

from ltconvert.convert.mixers.attention import Attention
from ltconvert.convert.mixers.blocks import blocks_of
from ltconvert.convert.mixers.context import SequenceContext
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student

WINDOW, BLOCK = 5, 3
SMALL = {"window_tokens": WINDOW, "block_tokens": BLOCK}


def pair(family: str = "llama", loops: int = 1, chosen: int = 2) -> tuple[LT2ForCausalLM, ...]:
    teacher = tiny_model(tiny_spec(family, num_loops=loops)).double().requires_grad_(False)
    return teacher, build_student(teacher, ["nsa"] * 3, {**SMALL, "chosen_blocks": chosen})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_where_all_blocks_are_chosen_it_is_the_teacher(family: str, loops: int) -> None:
    teacher, student = pair(family, loops, chosen=5)
    ids = tokens(2, 21)  # 16 tokens before the last one's window: 5 blocks of 3
    segments = torch.zeros_like(ids)
    segments[1, 8:] = 1
    with torch.no_grad():
        for layer in student.model.layers:  # unused: no block is left for them
            if layer.mixer.kind == "nsa":
                layer.mixer.key_weight.normal_()
        for given in ({}, {"segment_ids": segments}):
            wanted = teacher(ids, **given).logits
            torch.testing.assert_close(student(ids, **given).logits, wanted, atol=1e-9, rtol=1e-9)
        longer = tokens(2, 30)
        assert (student(longer).logits - teacher(longer).logits).abs().max() > 1e-3


def test_blocks_whose_keys_are_equal_lose_nothing() -> None:
    """What a mean stands for exactly: one key, any values, the block's size (fp32 at the start)."""
    teacher, student = pair(chosen=1)
    with torch.no_grad():
        for model in (teacher, student):
            for layer in model.model.layers:
                layer.mixer.k_proj.weight.zero_()
        ids = tokens(2, 40)
        wanted = teacher(ids).logits
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-5, rtol=1e-5)


def by_definition(mixer, x: Tensor, starts: list[int], window: int) -> Tensor:  # type: ignore[no-untyped-def]
    """One query and head at a time, of rows of documents without positions; fp64."""
    q, k, v = (y.transpose(1, 2)[0] for y in mixer.project(x))
    heads, groups = q.shape[0], k.shape[0]
    gates = 2 * torch.sigmoid(mixer.branch_proj(x)[0]).unflatten(-1, (3, heads))
    o = torch.zeros(x.shape[1], heads, q.shape[-1], dtype=x.dtype)
    scale, ratio = mixer.spec.attention_scale, heads // groups
    for start, stop in pairwise([*starts, x.shape[1]]):
        for t in range(start, stop):
            count = max(0, t + 1 - window - start) // BLOCK
            spans = [range(start + BLOCK * m, start + BLOCK * (m + 1)) for m in range(count)]
            for g in range(groups):
                mine = range(g * ratio, (g + 1) * ratio)
                keys = [(mixer.key_weight[g] * k[g, list(s)]).sum(0) for s in spans]
                values = [(mixer.value_weight[g] * v[g, list(s)]).sum(0) for s in spans]
                chosen: list[int] = []
                if count:
                    outline = torch.stack([scale * torch.stack(keys) @ q[h, t] for h in mine])
                    share = outline.softmax(-1).sum(0)
                    order = sorted(range(1, count), key=lambda m: float(share[m]), reverse=True)
                    chosen = [0, *order[: mixer.chosen - 1]]
                near = list(range(start + BLOCK * count, t + 1))
                for h in mine:
                    parts = [(0, k[g, s], v[g, s], 1) for s in near]
                    parts += [(1, k[g, s], v[g, s], 1) for m in chosen for s in spans[m]]
                    parts += [(2, keys[m], values[m], BLOCK)
                              for m in range(count) if m not in chosen]  # fmt: skip
                    weights = torch.stack([
                        gates[t, branch, h] * size * math.e ** (scale * q[h, t] @ key)
                        for branch, key, _, size in parts
                    ])  # fmt: skip
                    mixed = torch.stack([value for _, _, value, _ in parts])
                    o[t, h] = weights @ mixed / weights.sum()
    return mixer.o_proj(o.flatten(1))[None]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("starts", [[0], [0, 1, 2, 19]])
@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_the_formula(kv_heads: int, starts: list[int], chosen: int) -> None:
    spec = tiny_spec("llama", num_key_value_heads=kv_heads, layer_rope=(None,) * 3)
    options = {**SMALL, "chosen_blocks": chosen}
    mixer = tiny_model(spec, ["nsa"] * 3, **options).double().model.layers[1].mixer
    x = torch.randn(1, 33, 32, dtype=torch.float64)
    ids = torch.zeros(1, 33, dtype=torch.int64)
    for start in starts[1:]:
        ids[:, start:] += 1
    segments = ids if len(starts) > 1 else None
    context = context_of(33, segment_ids_BT=segments)
    with torch.no_grad():
        torch.testing.assert_close(mixer(x, context), by_definition(mixer, x, starts, WINDOW))


def context_of(length: int, **parts: Tensor | None) -> SequenceContext:
    return SequenceContext({}, length, torch.device("cpu"), torch.arange(length)[None], **parts)


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_begin_with_their_document(packed: bool) -> None:
    """Every key lies in one stretch or block that a query sees, and blocks are whole."""
    length, g = 40, torch.Generator().manual_seed(0)
    ids = (torch.rand(2, length, generator=g) < 0.2).cumsum(1)
    keep = torch.ones(2, length, dtype=torch.bool)
    keep[1, :7] = False
    parts = {"segment_ids_BT": ids} if packed else {"keep_BS": keep}
    found = blocks_of(context_of(length, **parts), length, BLOCK, WINDOW)
    for row in range(2):
        for t in range(length):
            if packed:
                start = min(s for s in range(length) if ids[row, s] == ids[row, t])
            else:
                start = 7 * row
            if t < start:
                continue
            first, past = int(found.first_BT[row, t]), int(found.past_BT[row, t])
            seen = [s for s in range(length) if first <= found.block_BS[row, s] < past]
            assert seen == list(range(start, start + BLOCK * (past - first)))
            assert found.local_BT[row, t] == start + len(seen)
            assert WINDOW <= t + 1 - found.local_BT[row, t] < WINDOW + BLOCK or not seen


def test_all_parts_learn() -> None:
    _, student = pair("ouro", 2)
    student.requires_grad_(True)
    student(tokens(2, 30), labels=tokens(2, 30)).loss.backward()
    for name, parameter in student.model.layers[1].mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_a_layer_with_a_window_of_its_own_stays_as_it_is() -> None:
    teacher, student = pair("gemma2")
    for layer, window in enumerate(teacher.model.spec.layer_windows):
        mixer = student.model.layers[layer].mixer
        assert (type(mixer) is Attention) == (window is not None)
    assert student.config.mixers == ["full", "nsa", "full"]
    kinds = ["sliding_attention", "compressed_sparse_attention", "sliding_attention"]
    assert student.config.layer_types == kinds


def test_a_cropped_cache_makes_its_blocks_again() -> None:
    _, student = pair("ouro", 2)
    ids, others = tokens(1, 30), tokens(1, 30, seed=4)
    with torch.no_grad():
        cache = student.new_cache()
        student(torch.cat([ids[:, :10], others[:, 10:17]], 1), cache=cache)
        cache.crop(-7)
        again = student(ids[:, 10:], cache=cache).logits
        torch.testing.assert_close(again, student(ids).logits[:, 10:], atol=1e-6, rtol=1e-6)
        cache.reset()
        torch.testing.assert_close(student(ids, cache=cache).logits, student(ids).logits)
