"""A teacher without some of its layers, and how much each is worth."""

from __future__ import annotations

import pytest
import torch
from evaluation_case import make_batch
from helpers import FAMILIES, NUM_LAYERS, tiny_model, tiny_spec, tokens
from torch.nn import functional as F

from ltconvert.convert.dropping import count_dropped, drop_layers, shortened_spec
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.damage import damage, least_damage
from ltconvert.errors import UserError


def silenced(model: LT2ForCausalLM, layer: int) -> LT2ForCausalLM:
    """The same model with a layer that adds nothing: what it adds is multiplied by 0."""
    block = model.model.layers[layer]
    for branch in (block.mixer_contribution, block.mlp_contribution):
        setattr(block, branch.__name__, lambda *given, branch=branch: 0.0 * branch(*given))
    return model


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dropped_layer_adds_nothing(family: str, gates: bool) -> None:
    options = {"sdpa_gate": gates, "loop_residual": gates}
    teacher, ids = tiny_model(tiny_spec(family), ["full"] * 3, **options), tokens(2, 9)
    with torch.no_grad():
        found = drop_layers(teacher, [1])(ids).logits
        wanted = silenced(teacher, 1)(ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_what_stays_is_the_teacher_s_memory() -> None:
    teacher = tiny_model(tiny_spec())
    model = drop_layers(teacher, [0])
    held = {p.data_ptr() for p in teacher.parameters()}
    assert {p.data_ptr() for p in model.parameters()} <= held
    assert len(model.model.layers) == NUM_LAYERS - 1


def test_a_looped_core_keeps_its_own_parts() -> None:
    teacher = tiny_model(tiny_spec("huginn"))
    model = drop_layers(teacher, [0])
    assert (model.config.num_layers, model.config.prelude_layers) == (2, 0)
    assert model.config.initial_state_std == teacher.config.initial_state_std
    with torch.no_grad():
        assert model(tokens(1, 5)).logits.isfinite().all()


def test_prelude_and_coda_shrink_with_their_layers() -> None:
    spec = tiny_spec("ouro", prelude_layers=1, coda_layers=1)
    assert shortened_spec(spec, [0]).prelude_layers == 0
    assert shortened_spec(spec, [2]).coda_layers == 0
    with pytest.raises(UserError, match="no layer of the core"):
        shortened_spec(spec, [1])
    with pytest.raises(UserError, match="names layer 3"):
        shortened_spec(spec, [3])


def test_counts() -> None:
    assert [count_dropped(wanted, 30) for wanted in (0.25, 7, [1, 2], 0)] == [8, 7, 2, 0]
    with pytest.raises(UserError, match=r"0\.1 of 4 layers is none; give 0\.125 or more"):
        count_dropped(0.1, 4)


@pytest.mark.parametrize("family", ["gemma2", "ouro"])
def test_damage_is_the_kl_of_the_model_without_the_layer(family: str) -> None:
    model, batch = tiny_model(tiny_spec(family)), make_batch([[9, 11], [16]], 20, 0)
    found = damage(model, [batch])

    def log_probs(of: LT2ForCausalLM) -> torch.Tensor:
        with torch.no_grad():
            out = of(
                batch.input_ids_BT, attention_mask=batch.keep_BT, segment_ids=batch.segment_ids_BT
            )
        return F.log_softmax(out.logits[(batch.labels_BT >= 0) & batch.keep_BT].double(), -1)

    whole = log_probs(model)
    for layer in range(NUM_LAYERS):
        without = log_probs(drop_layers(model, [layer]))
        kl = (whole.exp() * (whole - without)).sum(-1).mean()
        assert found[layer] == pytest.approx(float(kl), rel=1e-4)
    assert least_damage(model, [batch], 1) == [found.index(min(found))]
