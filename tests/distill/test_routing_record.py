"""Routes and depth weights of a Dreamer on text, against those of its parts called by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from dreamer_case import released
from evaluation_case import make_batch
from helpers import tiny_model, tiny_spec

from ltconvert.distill.evaluation.routing_record import by_depths, depth_map, pool_usage

BATCH = make_batch([[9, 11], [16]], 20, 0)  # two documents and a padded one
KEPT = 20 + 16


def test_tokens_that_are_no_padding_are_counted_once_a_choice() -> None:
    model = released(slices=2, top_experts=3, top_entries=2)
    usage = pool_usage(model, [BATCH, BATCH])
    for name, choices in (("attention", 2), ("experts", 3)):
        assert usage[name].tokens == 2 * KEPT
        assert usage[name].chosen_DE.sum(1).tolist() == [2 * KEPT * choices] * 3


def test_effects_are_shares_of_the_stream() -> None:
    """The weights of a token's experts sum to the slices of one MLP, those of entries to 1."""
    model = released(slices=2, top_experts=3)
    layer, wanted = model.model.dreamer, {"attention": [], "experts": []}
    usage = pool_usage(model, [BATCH])
    added: dict[str, torch.Tensor] = {}
    layer.attention.register_forward_hook(lambda _, given, h: added.update(attention=h - given[0]))
    layer.experts.register_forward_hook(lambda _, given, h: added.update(experts=h - given[0]))

    def note(_: Any, __: Any, left: Any) -> None:
        for name, slices in (("attention", 1), ("experts", 2)):
            share_BT = added[name].norm(dim=-1) / left[0].norm(dim=-1)
            wanted[name].append(slices * float(share_BT[BATCH.keep_BT].sum()))

    layer.register_forward_hook(note)
    with torch.no_grad():
        model.model(
            BATCH.input_ids_BT, attention_mask=BATCH.mask_BT, segment_ids=BATCH.segment_ids_BT
        )
    for name, sums in wanted.items():
        assert usage[name].effect_DE.sum(1).tolist() == pytest.approx(sums, rel=1e-4)


@pytest.mark.parametrize("family", ["olmo2", "gemma3"])
def test_effects_are_what_reaches_the_stream(family: str) -> None:
    """A norm behind a branch undoes a factor on it: the function stays, and so do effects."""
    model = released(family)
    layer = model.model.dreamer
    layer.spec = layer.attention.spec = layer.experts.spec = replace(layer.spec, rms_norm_eps=0.0)
    before = pool_usage(model, [BATCH])
    with torch.no_grad():
        for bank in (layer.attention.o, layer.experts.down):
            for parameter in bank.parameters():
                parameter.mul_(8.0)
    after = pool_usage(model, [BATCH])
    for name, usage in before.items():
        torch.testing.assert_close(after[name].effect_DE, usage.effect_DE, rtol=1e-4, atol=1e-6)


def test_choices_are_those_of_the_model() -> None:
    model = released()
    usage = pool_usage(model, [BATCH])["experts"]
    with torch.no_grad():
        output = model.model(
            BATCH.input_ids_BT, attention_mask=BATCH.mask_BT, segment_ids=BATCH.segment_ids_BT
        )
    for depth, (_, experts) in enumerate(output.routes):
        ids = experts.chosen_NK[BATCH.keep_BT.flatten()]
        wanted = [int((ids == expert).sum()) for expert in range(3)]
        assert usage.chosen_DE[depth].tolist() == wanted


def test_while_routing_is_forced_each_depth_uses_its_layer() -> None:
    model = released("ouro", slices=2)
    model.model.dreamer.set_release(0.0)
    usage = pool_usage(model, [BATCH])
    assert usage["attention"].depths_E() == [4] * 3  # loops
    assert usage["experts"].distinct_D() == [2] * 12
    assert usage["experts"].imbalance() == 1.0


def test_depth_weights_are_those_written_out() -> None:
    model = released(depth_heads=2)
    attention, ids = model.model.dreamer.depth, BATCH.input_ids_BT
    seen: list[tuple[Any, ...]] = []
    handle = attention.register_forward_hook(lambda _, given, __: seen.append(given))
    with torch.no_grad():
        model.model(ids, attention_mask=BATCH.mask_BT, segment_ids=BATCH.segment_ids_BT)
    handle.remove()
    keys, wanted = [], [[], [1.0]]
    with torch.no_grad():
        for h_BTC, depth, _ in seen:
            x_BTC = attention.norm(h_BTC)
            keys.append(attention.placed(attention.k_proj, x_BTC, depth))
            q_BTHD = attention.placed(attention.q_proj, x_BTC, depth)
    scores = torch.stack([(q_BTHD * key).sum(-1) for key in keys[:2]], dim=-1)
    weights = (scores / attention.head_dim**0.5).softmax(-1)
    wanted.append(weights[BATCH.keep_BT].mean((0, 1)).tolist())
    found = depth_map(model, [BATCH])
    assert [len(row) for row in found] == [0, 1, 2]
    for row, expected in zip(found, wanted, strict=True):
        assert row == pytest.approx(expected, abs=1e-5)
    assert depth_map(released(depth_heads=0), [BATCH]) == []


def test_depths_are_scored_and_set_back() -> None:
    teacher, model = tiny_model(tiny_spec()), released()
    model.model.dreamer.set_release(0.0)
    model.model.dreamer.depth.o_proj.weight.data.zero_()
    rows = by_depths(model, teacher, [BATCH])
    assert [row["depths"] for row in rows] == [2, 3, 4]
    assert rows[1]["kl"] == pytest.approx(0, abs=1e-6) and rows[0]["kl"] > 1e-3
    assert model.config.depths is None and len(model.model.schedule) == 3


def test_what_is_recorded_is_plain() -> None:
    usage = pool_usage(released(), [BATCH])
    assert json.loads(json.dumps(usage["experts"].to_dict()))["tokens"] == KEPT
