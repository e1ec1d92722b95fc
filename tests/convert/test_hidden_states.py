"""`output_hidden_states` and `output_attentions`; families in `teachers/test_parity.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens
from torch import Tensor

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student

KINDS: dict[str, list[str]] = {
    "hybrid": ["gdn", "full", "window"],
    "moda": ["moda", "gdn_window", "moda"],
    "dreamer": ["full", "full", "full"],
}
POOLS = {"entries": 3, "experts": 6, "slices": 2, "top_experts": 3}


def student(kind: str) -> LT2ForCausalLM:
    options: dict[str, Any] = {"dreamer": POOLS} if kind == "dreamer" else {}
    spec = tiny_spec("ouro", num_loops=2)
    return tiny_model(spec, KINDS[kind], window_tokens=5, **options).double()


def hidden(model: LT2ForCausalLM, ids: Tensor, **given: Any) -> tuple[Tensor, ...]:
    output = model(ids, output_hidden_states=True, **given)
    assert output.hidden_states[-1] is output.last_hidden_state
    return output.hidden_states


@torch.no_grad()
def test_loops_are_those_of_an_unrolled_model() -> None:
    six = {"num_layers": 6, "layer_rope": ("default",) * 6, "layer_windows": (None,) * 6}
    looped, deep = tiny_model(tiny_spec(num_loops=2)), tiny_model(tiny_spec(**six))
    copies = {
        f"model.layers.{int(layer) + 3}.{rest}": value
        for name, value in looped.model.layers.state_dict().items()
        for layer, rest in [name.split(".", 1)]
    }
    deep.load_state_dict(looped.state_dict() | copies)
    ids = tokens(2, 9)
    torch.testing.assert_close(hidden(looped, ids), hidden(deep, ids))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["moda", "dreamer"])
def test_students_that_start_as_their_teacher_have_its_states(kind: str) -> None:
    teacher, ids = tiny_model(tiny_spec("ouro", num_loops=2)), tokens(2, 9)
    pools = {**POOLS, "shared_size": 16, "stream_norm": True}
    mixers, options = {"moda": (["moda"] * 3, {}), "dreamer": (["full"] * 3, {"dreamer": pools})}[
        kind
    ]
    found = hidden(build_student(teacher, mixers, options), ids)
    wanted = hidden(teacher, ids)
    assert len(wanted) == 1 + 2 * 3
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_generate_gives_the_states_of_a_whole_pass(kind: str) -> None:
    model, ids = student(kind), tokens(2, 6)
    call = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    asked = {"output_hidden_states": True, "return_dict_in_generate": True}
    found = model.generate(ids, **call, **asked)
    wanted = hidden(model, found.sequences[:, :-1])
    steps = [torch.cat(states, dim=1) for states in zip(*found.hidden_states, strict=True)]
    torch.testing.assert_close(tuple(steps), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_neither_states_nor_gradients(kind: str) -> None:
    model, ids = student(kind).train(), tokens(2, 7)
    results = []
    for _ in range(2):
        states = hidden(model, ids)
        sum(state.square().mean() for state in states).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((states, gradients))
        model.zero_grad()
        model.gradient_checkpointing_enable()
    torch.testing.assert_close(*results)


@torch.no_grad()
def test_they_are_given_where_asked_for_alone() -> None:
    model, ids = student("hybrid"), tokens(2, 7)
    plain, asked = model(ids), model(ids, output_hidden_states=True)
    assert plain.hidden_states is None
    assert torch.equal(plain.logits, asked.logits)
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 7
    assert model(ids, output_hidden_states=False).hidden_states is None


@torch.no_grad()
def test_a_token_that_leaves_early_has_the_states_of_its_loops() -> None:
    model, ids = student("hybrid"), tokens(1, 6)
    cache = model.new_cache()
    model(ids[:, :5], cache=cache)
    found = hidden(model, ids[:, 5:], cache=cache, exit_threshold=0.0)
    wanted = [state[:, 5:] for state in hidden(model, ids)[:4]]
    torch.testing.assert_close(list(found), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"output_attentions": True}, "never form attention weights"),
        ({"output_hidden_states": [1, 2]}, "take True and pick"),
        ({"output_hidden_states": 1}, "take True and pick"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(asked: dict[str, Any], message: str) -> None:
    model, ids = student("hybrid"), tokens(1, 3)
    for call in (model, model.model, partial(model.generate, max_new_tokens=1)):
        with pytest.raises(ValueError, match=message) as caught:
            call(ids, **asked)
        assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_of_the_callers_own_are_read_like_tokens(family: str) -> None:
    """As in transformers: what the model's embedding gives, scaled by the model."""
    model, ids = tiny_model(tiny_spec(family)), tokens(2, 9)
    embedded = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=embedded).logits, model(ids).logits)
    call = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(inputs_embeds=embedded, **call)
    assert torch.equal(found[:, -4:], model.generate(ids, **call)[:, -4:])
