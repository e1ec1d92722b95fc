"""Mixture-of-depths students: the teacher at schedule 0, the published formula at schedule 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens
from torch import Tensor

from ltconvert.convert.checkpoint import load_student, save_student
from ltconvert.convert.decoding import Decoder
from ltconvert.convert.mixers.context import DepthView
from ltconvert.convert.students import depth
from ltconvert.convert.students.depth_plan import DepthVisit
from ltconvert.convert.students.depth_stream import DepthStream
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student, restore_full
from ltconvert.kernels.depth_attention import DepthSlots

MODA = ["moda"] * 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loops", [1, 2, 4])
def test_it_starts_as_its_teacher(family: str, loops: int) -> None:
    teacher = tiny_model(tiny_spec(family, num_loops=loops))
    student, ids = build_student(teacher, MODA), tokens(2, 17)
    assert student.model.depth_schedule == 0
    with torch.no_grad():
        wanted = teacher(ids).logits
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-4, rtol=0)
        student.model.depth_schedule.fill_(1)
        assert (student(ids).logits - wanted).abs().max() > 1e-2


def turned(x: Tensor, position: int, frequencies: Tensor | None) -> Tensor:
    """RoPE of vectors [..., D] at one position, as products of complex numbers."""
    if frequencies is None:
        return x
    pairs = torch.complex(*x.chunk(2, dim=-1))
    pairs = pairs * torch.polar(torch.ones_like(frequencies), position * frequencies)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


Left = list[tuple[Tensor, Tensor]]  # what sublayers left, in their order: keys, values [T, G, D]


def by_definition(
    model: LT2ForCausalLM, ids: Tensor, read_by: Callable[[Left], Left] = lambda left: left
) -> Tensor:
    """Logits [T, V] of one row: one softmax over concatenated keys, one query and head at a time.

    arXiv 2603.15619, section 3: keys of the sequence and of all earlier sublayers at the token.

    Args:
        read_by: of what was left so far, what the next visit reads.
    """
    inner, spec = model.model, model.model.spec
    h = inner.embed(ids)[0]
    left: Left = []
    group = spec.num_attention_heads // spec.num_key_value_heads
    for step in inner.schedule:
        layer = inner.layers[step.layer]
        mixer = layer.mixer
        name = spec.layer_rope[step.layer]
        angles = None if name is None else inner._ropes[name].frequencies("cpu")[0].double()
        angles = None if angles is None else angles[: spec.head_dim // 2]
        depth_angles = angles if model.config.depth_rope else None
        x = layer.mixer_input(h[None])
        q, k, v = (y[0] for y in mixer.project(x))
        out = torch.zeros_like(q)
        for t in range(len(h)):
            first = 0 if mixer.window is None else max(0, t - mixer.window + 1)
            for head in range(spec.num_attention_heads):
                g = head // group
                query = turned(q[t, head], t, angles)
                keys = [turned(k[s, g], s, angles) for s in range(first, t + 1)]
                read = read_by(left)
                keys += [turned(key[t, g], t, depth_angles) for key, _ in read]
                values = [v[s, g] for s in range(first, t + 1)]
                values += [value[t, g] for _, value in read]
                scores = torch.stack(keys) @ query * spec.attention_scale
                if (cap := spec.attention_softcap) is not None:
                    scores = cap * torch.tanh(scores / cap)
                out[t, head] = scores.softmax(-1) @ torch.stack(values)
        own = (k, v)
        if "attention" in layer.depth_proj:
            key, value = layer.depth_proj["attention"](layer.mixer_input(h[None]))
            own = (key[0], value[0])
        left.append(own)
        h = h + layer.mixer_contribution(mixer.o_proj(out.flatten(1))[None])[0]
        x = layer.mlp_input(h[None])
        if "ffn" in layer.depth_proj:
            key, value = layer.depth_proj["ffn"](x)
            left.append((key[0], value[0]))
        h = h + layer.mlp_contribution(x)[0]
        if step.closes_loop and (spec.loop_norm == "every" or step is inner.schedule[-1]):
            h = inner.norm(h)
    return model.logits(h)


@pytest.mark.parametrize(
    ("family", "loops"),
    [("llama", 1), ("qwen2", 2), ("qwen3", 1), ("smollm3", 1), ("olmo2", 1), ("gemma2", 2),
     ("gemma3", 1), ("ouro", 3)],
)  # fmt: skip
def test_at_the_end_it_is_the_published_formula(family: str, loops: int) -> None:
    model = tiny_model(tiny_spec(family, num_loops=loops), MODA).double()
    model.model.depth_schedule.fill_(1)
    ids = tokens(1, 11)
    with torch.no_grad():
        wanted = by_definition(model, ids)
        torch.testing.assert_close(model(ids).logits[0], wanted, atol=1e-5, rtol=1e-5)


def last_two_visits(left: Left) -> Left:
    return left[-4:]


def every_second_visit(left: Left) -> Left:
    return [slot for i, slot in enumerate(left) if i // 2 % 2 == 0]


def means_of_two_visits(left: Left) -> Left:
    found: Left = []
    for i in range(0, len(left) - 3, 4):
        for a, b in ((left[i], left[i + 2]), (left[i + 1], left[i + 3])):  # by kind
            found.append(((a[0] + b[0]) / 2, (a[1] + b[1]) / 2))
    return found


@pytest.mark.parametrize(
    ("options", "read_by"),
    [
        ({"depth_writers": "attention"}, lambda left: left),
        ({"depth_writers": "ffn"}, lambda left: left),
        ({"depth_rope": False}, lambda left: left),
        ({"depth_slots": "last:2"}, last_two_visits),
        ({"depth_slots": "every:2"}, every_second_visit),
        ({"depth_slots": "mean:2"}, means_of_two_visits),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else x.__name__,
)
def test_variants_and_bounds_by_definition(
    options: dict[str, object], read_by: Callable[[Left], Left]
) -> None:
    model = tiny_model(tiny_spec("qwen3", num_loops=2), MODA, **options).double()
    model.model.depth_schedule.fill_(1)
    with torch.no_grad():
        wanted = by_definition(model, tokens(1, 7), read_by)
        torch.testing.assert_close(model(tokens(1, 7)).logits[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depth_slots": "first:2"}, r"unknown depth_slots 'first:2'; expected all, last:n"),
        ({"depth_slots": "last:0"}, "n from 1"),
        ({"depth_writers": "mlp"}, "unknown depth_writers 'mlp'; choose one of attention, ffn"),
    ],
)
def test_unknown_words_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model(tiny_spec(), MODA, **given)


def test_what_nobody_would_read_is_not_made() -> None:
    dense = tiny_model(tiny_spec(), MODA).model
    assert [list(layer.depth_proj) for layer in dense.layers] == [["attention", "ffn"]] * 2 + [[]]
    assert dense.depth_plan is not None and dense.depth_plan.kinds == ("attention", "ffn") * 2
    looped = tiny_model(tiny_spec("ouro"), MODA).model  # 4 loops of 3 layers
    assert all(len(layer.depth_proj) == 2 for layer in looped.layers)
    assert looped.depth_plan is not None and looped.depth_plan.slots == 2 * 11
    hybrid = tiny_model(tiny_spec(), ["moda", "moda", "gdn"], depth_linear_writes=True).model
    assert [len(layer.depth_proj) for layer in hybrid.layers] == [2, 0, 0]
    published = tiny_model(tiny_spec(), MODA, depth_writers="ffn").model
    assert [list(layer.depth_proj) for layer in published.layers] == [["ffn"], ["ffn"], []]
    assert tiny_model(tiny_spec(), ["full"] * 3).model.depth_plan is None


def test_projections_that_a_new_plan_does_not_need_are_gone(tmp_path: Path) -> None:
    teacher = tiny_model(tiny_spec())
    student = build_student(teacher, ["gdn", "moda", "moda"], {"depth_slots": "every:2"})
    assert [len(layer.depth_proj) for layer in student.model.layers] == [0, 2, 0]
    restore_full(student, teacher, [0], "moda")
    assert [len(layer.depth_proj) for layer in student.model.layers] == [2, 0, 0]
    save_student(student, None, tmp_path / "student", {})
    again, ids = load_student(tmp_path / "student"), tokens(1, 5)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, student(ids).logits)


def test_linear_layers_write_where_asked_for() -> None:
    for asked in (False, True):
        model = tiny_model(tiny_spec(), ["moda", "gdn", "moda"], depth_linear_writes=asked).model
        assert model.depth_plan is not None
        assert model.depth_plan.kinds == ("attention", "ffn") + ("ffn",) * asked
        assert list(model.layers[1].depth_proj) == ["ffn"] * asked


def test_a_token_that_leaves_early_reads_the_loops_that_ran() -> None:
    model, ids = tiny_model(tiny_spec("ouro"), MODA).double(), tokens(2, 9)
    with torch.no_grad():
        model.model.exit_gate.bias.fill_(60.0)  # leave after the first loop
        whole, early = model.new_cache(), model.new_cache()
        for cache in (whole, early):
            model(ids[:, :8], cache=cache)
        wanted = model(ids[:, 8:], cache=whole).loop_states[0]
        found = model(ids[:, 8:], cache=early, exit_threshold=0.5)
    assert len(found.loop_states) == 1
    torch.testing.assert_close(found.last_hidden_state, wanted)


def gradients(model: LT2ForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "options",
    [
        {"depth_bias": -1.0},
        {"depth_slots": "last:2", "depth_writers": "ffn"},
        {"depth_slots": "mean:2"},
    ],
    ids=str,
)
def test_gradients_are_those_of_slots_that_are_stacked_anew(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain of reads and writes against autograd's own sums; numbers the same twice."""
    model = tiny_model(tiny_spec("smollm3", num_loops=2), MODA, **options).double()
    found, again = (gradients(model, tokens(2, 9)) for _ in range(2))

    class Stacked(DepthStream):
        def view(self, visit: DepthVisit) -> DepthView:
            slots = {}
            for name in self.names if visit.reads else ():
                read = self.all[visit.first : visit.stop]
                placed = [(self._placed(k, name), v) for k, v in read]
                slots[name] = DepthSlots(*map(torch.stack, zip(*placed, strict=True)), None)
            return DepthView(slots, visit.stop - visit.first, self.schedule, visit.writes)

        def _put(self, k_BTGD: Tensor, v_BTGD: Tensor) -> None:
            self.all = [*getattr(self, "all", []), (k_BTGD, v_BTGD)]
            self.written += 1

    monkeypatch.setattr(depth, "DepthStream", Stacked)
    wanted = gradients(model, tokens(2, 9))
    assert found.keys() == wanted.keys() and any("depth_proj" in name for name in wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)
        assert torch.equal(found[name], again[name]), name


def test_a_second_backward_through_one_pass_gives_the_same() -> None:
    model, ids = tiny_model(tiny_spec(), MODA).double(), tokens(1, 6)
    loss = model(ids, labels=ids).loss
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "olmo2"])
def test_slots_start_with_the_teachers_values_and_weigh_the_same(family: str) -> None:
    """Values of an MLP's slot are those of the attention after it, in the order of visits."""
    teacher = tiny_model(tiny_spec(family, num_loops=2))
    student = build_student(teacher, MODA)
    x = torch.randn(1, 3, 32)
    for layer, block in enumerate(student.model.layers):
        for kind, source in (("attention", layer), ("ffn", (layer + 1) % 3)):
            with torch.no_grad():
                key, value = block.depth_proj[kind](x)
                wanted = teacher.model.layers[source].mixer.project(x)[2]
            assert torch.equal(value, wanted) and not key.any()


def test_keys_that_are_zero_can_learn() -> None:
    for family in ("llama", "qwen3"):
        student = build_student(tiny_model(tiny_spec(family)), MODA)
        student.model.depth_schedule.fill_(0.1)
        found = gradients(student, tokens(2, 9))
        of_keys = [g for name, g in found.items() if "depth_proj" in name and ".k_" in name]
        assert of_keys and sum(float(g.abs().sum()) for g in of_keys) > 0


def test_full_layers_that_come_back_can_read_depth() -> None:
    teacher = tiny_model(tiny_spec("ouro"))
    student = build_student(teacher, ["gdn"] * 3, {"depth_linear_writes": True})
    assert student.model.depth_plan is None
    restore_full(student, teacher, [0, 2], "moda")
    assert student.config.mixers == ["moda", "gdn", "moda"]
    full = build_student(teacher, ["gdn"] * 3)
    for theirs, own in zip(full.model.layers, student.model.layers, strict=True):
        if own.mixer.kind == "gdn":
            theirs.mixer.load_state_dict(own.mixer.state_dict())
    restore_full(full, teacher, [0, 2])
    ids = tokens(2, 9)
    with torch.no_grad():
        wanted = full(ids).logits
        torch.testing.assert_close(student(ids).logits, wanted, atol=1e-4, rtol=0)
        assert [len(layer.depth_proj) for layer in student.model.layers] == [2, 1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"depth_writers": "ffn", "depth_slots": "last:2", "depth_bias": -1.0},
        {"depth_linear_writes": True, "depth_slots": "mean:2", "depth_rope": False},
        {"tied_rank": 3, "depth_writers": "attention"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "smollm3"])
def test_a_step_of_the_fast_decoder_has_the_logits_of_an_uncached_pass(
    family: str, options: dict[str, object]
) -> None:
    own = {name: value for name, value in options.items() if name == "tied_rank"}
    spec = tiny_spec(family, num_loops=2, **own)
    given = {name: value for name, value in options.items() if name not in own}
    model = tiny_model(spec, ["moda", "gdn", "moda"], sdpa_gate=True, **given).double()
    ids = tokens(2, 9)
    decoder = Decoder(model, 2, 12)
    with torch.no_grad():
        wanted = model(ids).logits
        found = [decoder.prefill(ids[:, :5], [0, 0])]
        found += [decoder.step(ids[:, t]) for t in range(5, 9)]
    torch.testing.assert_close(torch.stack(found, 1), wanted[:, 4:], atol=1e-5, rtol=1e-5)
