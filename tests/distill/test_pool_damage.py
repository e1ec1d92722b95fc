"""What a Dreamer's entries are worth, against models that do without them."""

from __future__ import annotations

import copy

import pytest
import torch
from dreamer_case import released
from evaluation_case import make_batch
from torch.nn import functional as F

from ltconvert.convert.students.dreamer.shrink import Cut, choose, shrink
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.distill.pool_damage import Damage, pool_damage

BATCH = make_batch([[9, 11], [16]], 20, 0)  # two documents and a padded one


def log_probs(model: LT2ForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        output = model(
            BATCH.input_ids_BT, attention_mask=BATCH.mask_BT, segment_ids=BATCH.segment_ids_BT
        )
    return F.log_softmax(output.logits[BATCH.keep_BT].double(), -1)


@pytest.mark.parametrize("select_by", ["logits", "scores"])
def test_damage_is_the_kl_of_the_model_whose_pool_lacks_the_entry(select_by: str) -> None:
    """A bias above 0 would choose an entry whose score is 0."""
    model = released(select_by=select_by)
    layer, calls = model.model.dreamer, []
    layer.attention_router.balance.copy_(torch.tensor([0.7, -0.3, 0.9]))
    before = layer.attention_router.balance.clone()
    found = pool_damage(model, layer.attention_router, [BATCH], done=calls.append)
    assert len(calls) == 3 and torch.equal(layer.attention_router.balance, before)
    whole, three = log_probs(model), Cut(((0,), (1,), (2,)), ((1.0,),) * 3)
    for entry in range(3):
        kept = tuple((i,) for i in range(3) if i != entry)
        other = copy.deepcopy(model)
        shrink(other, Cut(kept, ((1.0,),) * 2), three)
        without = log_probs(other)
        kl = (whole.exp() * (whole - without)).sum(-1).mean()
        assert float(found[entry]) == pytest.approx(float(kl), rel=1e-4)


def test_judging_goes_on_behind_the_passes_that_were_made() -> None:
    """From the middle of a batch, from its end, and from the end of all."""
    model, batches = released(), [BATCH, make_batch([[20], [7]], 20, 1)]
    router, states = model.model.dreamer.expert_router, []
    whole = pool_damage(model, router, batches, done=states.append)
    assert [state.passes for state in states] == [1, 2, 3, 4, 5, 6]
    for state in states:
        left: list[Damage] = []
        again = pool_damage(model, router, batches, so_far=state, done=left.append)
        assert torch.equal(again, whole) and left == states[state.passes :]


def test_what_is_worth_least_leaves_however_much_it_is_used() -> None:
    effect_DE = torch.tensor([[5.0, 1.0, 3.0]])
    cut = choose(effect_DE, torch.eye(3), 2, worth_E=torch.tensor([0.1, 2.0, 3.0]))
    assert cut.kept == [1, 2]
