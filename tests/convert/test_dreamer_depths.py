"""Fewer and more depths than a Dreamer was made for."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from dreamer_case import released
from helpers import tiny_model, tiny_spec, tokens

from ltconvert.convert.checkpoint import load_student, save_student
from ltconvert.convert.decoding import Decoder
from ltconvert.convert.dropping import drop_layers
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.dreamer.depths import set_depths
from ltconvert.convert.students.dreamer.layer import DreamerPass
from ltconvert.convert.transfer import build_student
from ltconvert.errors import UserError


def test_fewer_depths_of_forced_routing_are_the_teacher_without_its_last_layers() -> None:
    teacher, student, ids = tiny_model(tiny_spec("qwen3")), released("qwen3"), tokens(2, 9)
    layer = student.model.dreamer
    layer.set_release(0.0)
    layer.depth.o_proj.weight.data.zero_()
    said = set_depths(student, 2)
    assert said == "trained for 3 depths, runs 2: it was not trained to stop there"
    with torch.no_grad():
        wanted = drop_layers(teacher, [2])(ids).logits
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-4, rtol=0)
        assert set_depths(student, None) is None
        torch.testing.assert_close(student(ids).logits, teacher(ids).logits, atol=1e-4, rtol=0)


# Streams, counted in visits, that the final norm has closed already.
@pytest.mark.parametrize(
    ("loop_norm", "closed"), [("last", {6}), ("core", {5, 6}), ("every", {3, 5, 6})]
)
def test_the_final_norm_closes_a_pass_wherever_it_ends(
    loop_norm: Literal["last", "core", "every"], closed: set[int]
) -> None:
    """In the prelude, in a loop, between loops, before the coda, behind it; decoding agrees."""
    shape = {"num_layers": 4, "layer_rope": ("default",) * 4, "layer_windows": (None,) * 4}
    loops = {"num_loops": 2, "prelude_layers": 1, "coda_layers": 1, "loop_norm": loop_norm}
    teacher, ids = tiny_model(tiny_spec("llama", **shape, **loops)), tokens(2, 6)
    student = build_student(teacher, ["full"] * 4, {"dreamer": {"entries": 4, "experts": 4}})
    with torch.no_grad():
        streams = teacher.model(ids, output_hidden_states=True).hidden_states
        for depths in range(1, 8):
            set_depths(student, depths)
            if depths <= 6:
                h = streams[depths]
                wanted = student.logits(h if depths in closed else student.model.norm(h))
                torch.testing.assert_close(student(ids).logits, wanted, atol=1e-4, rtol=1e-4)
            written = student.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
            decoder = Decoder(student, batch=2, max_length=10)
            assert torch.equal(decoder.generate(ids, max_new_tokens=4), written[:, 6:])


@pytest.mark.parametrize("family", ["llama", "ouro", "gemma2", "huginn"])
@pytest.mark.parametrize("depths", [1, 2, 15])
def test_cached_steps_equal_the_whole_pass(family: str, depths: int) -> None:
    student, ids = released(family), tokens(1, 7)
    set_depths(student, depths)
    with torch.no_grad():
        wanted = student(ids).logits
        cache = student.new_cache()
        assert len(cache) == depths
        steps = [student(ids[:, t : t + 1], cache=cache).logits for t in range(7)]
        written = student.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    torch.testing.assert_close(torch.cat(steps, dim=1), wanted, atol=1e-4, rtol=1e-4)
    assert written.shape == (1, 10)


def test_more_depths_repeat_the_last_one() -> None:
    student, ids = released(depth_heads=0), tokens(2, 9)
    inner = student.model
    with torch.no_grad():
        hidden = []
        handle = inner.dreamer.register_forward_hook(lambda _, __, out: hidden.append(out[0]))
        set_depths(student, 5)
        found = inner(ids).last_hidden_state
        handle.remove()
        # By hand: the layer as at its third depth, on its own output.
        set_depths(student, None)
        context = inner.context(hidden[2])
        visit = DreamerPass.of(inner.dreamer).visit(inner.schedule[2], context)
        h = inner.dreamer(hidden[2], visit)[0]
        h = inner.dreamer(h, visit)[0]
    torch.testing.assert_close(found, inner.norm(h))


def test_the_line_names_depth_attention_where_there_is_some() -> None:
    assert "does not see them" in str(set_depths(released(), 4))
    assert "depth attention" not in str(set_depths(released(depth_heads=0), 4))


def test_depths_are_saved(tmp_path: Path) -> None:
    student, ids = released(), tokens(1, 6)
    set_depths(student, 5)
    save_student(student, None, tmp_path, {})
    loaded = load_student(tmp_path)
    assert loaded.config.num_hidden_layers == 5
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, student(ids).logits)


def test_mistakes_are_refused() -> None:
    with pytest.raises(UserError, match="one depth at least"):
        set_depths(released(), 0)
    with pytest.raises(UserError, match="of a Dreamer alone"):
        set_depths(tiny_model(tiny_spec()), 2)


def test_layers_behind_the_last_depth_cost_nothing() -> None:
    student = released()
    whole = model_facts(student.config).layers
    set_depths(student, 2)
    *first, last = model_facts(student.config).layers
    assert first == list(whole[:2])
    assert last.visits == 0 and last.visited == (0, 0) and last.cache_bytes(64) == 0
