"""Stage `align`: what is compared, what is counted, whose gradients, and how it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import FAMILIES, scatter, tiny_model, tiny_spec, tokens
from torch import Tensor

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.distill.align import AlignObjective, calibrate
from ltconvert.distill.data import Batch
from ltconvert.distill.parking import Parking


def packed(rows: int = 2, length: int = 23, padding: int = 0) -> Batch:
    """Random rows of two documents each, the last ``padding`` tokens of the last row padded."""
    ids_BT = tokens(rows, length)
    segments_BT = (torch.arange(length) >= 9).int().repeat(rows, 1)
    keep_BT = torch.ones(rows, length, dtype=torch.bool)
    if padding:
        keep_BT[-1, -padding:] = False
        segments_BT[-1, -padding:] = 2
    labels_BT = torch.where(segments_BT == segments_BT.roll(-1, 1), ids_BT.roll(-1, 1), -100)
    return Batch(ids_BT, segments_BT, labels_BT, keep_BT)


def pair(
    family: str, mixers: list[str] | None = None, windows: int | list[int] = 5, **changes: object
) -> tuple[LT2ForCausalLM, LT2ForCausalLM]:
    """A random teacher and a student that shares its tensors, its mixers scattered."""
    teacher = tiny_model(tiny_spec(family, **changes)).requires_grad_(False)
    mixers = mixers or ["gdn"] * len(teacher.model.layers)
    student = build_student(teacher, mixers, {"window_tokens": windows}, share=True)
    for seed, layer in enumerate(student.model.layers):
        if layer.mixer.kind != "full":
            scatter(layer.mixer, seed + 1)
    return teacher, student


def direct_loss(
    teacher: LT2ForCausalLM, student: LT2ForCausalLM, batch: Batch
) -> tuple[Tensor, int]:
    """The same loss written as one sum over an ordinary walk through the teacher, one graph."""
    model, pupil = teacher.model, student.model
    h_BTC = model.embed(batch.input_ids_BT)
    context = model.context(h_BTC, attention_mask=batch.keep_BT, segment_ids=batch.segment_ids_BT)
    keep = batch.keep_BT
    losses = []
    for loop in range(model.spec.num_loops):
        for i, layer in enumerate(model.layers):
            context = context.at(loop)
            x_BTC = layer.mixer_input(h_BTC, loop)
            target = layer.mixer_contribution(layer.mixer(x_BTC, context), loop)
            if student.config.mixers[i] != "full":
                guess = layer.mixer_contribution(pupil.layers[i].mixer(x_BTC, context), loop)
                losses.append((guess - target)[keep].square().mean() / target[keep].square().mean())
            h_BTC = h_BTC + target
            h_BTC = h_BTC + layer.mlp_branch(h_BTC, loop)
        if model.spec.loop_norm == "every":
            h_BTC = model.norm(h_BTC)
    return torch.stack(losses).mean(), len(losses)


def mixer_gradients(student: LT2ForCausalLM) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in student.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("family", [*FAMILIES, "tied", "widening"])
@pytest.mark.parametrize(
    "mixers", [["gdn"] * 3, ["window"] * 3, ["kda", "mamba2", "retnet"]], ids="-".join
)
def test_local_backwards_equal_one_global_loss(family: str, mixers: list[str]) -> None:
    changes = {
        "tied": {"family": "qwen2", "num_loops": 3, "tied_rank": 2},
        "widening": {"family": "ouro", "windows": [1, 3, 5, 20]},
    }.get(family, {})
    teacher, student = pair(**({"family": family, "mixers": mixers} | changes))
    batch = packed(padding=4)
    objective = AlignObjective(teacher, student)
    parts: list[Tensor] = []

    def backward(loss: Tensor) -> None:
        parts.append(loss.detach())
        loss.backward()

    metrics = objective.train_step(batch, backward, 0.0)
    local = mixer_gradients(student)
    student.zero_grad()
    expected, visits = direct_loss(teacher, student, batch)
    expected.backward()
    assert len(parts) == objective.num_visits == visits == 3 * teacher.model.spec.num_loops
    torch.testing.assert_close(metrics["loss"], expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.stack(parts).sum(), metrics["loss"])
    for name, gradient in mixer_gradients(student).items():
        torch.testing.assert_close(local[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_window_over_the_whole_row_has_nothing_to_learn_in_huginn() -> None:
    teacher = tiny_model(tiny_spec("huginn"))
    student = build_student(teacher, ["window"] * 3, {"window_tokens": 23}, share=True)
    objective = AlignObjective(teacher, student)
    loss = objective.train_step(packed(padding=4), lambda part: None, 0.0)["loss"]
    assert objective.num_visits == 5 and loss < 1e-9


def test_only_mixers_of_converted_layers_train_and_the_rest_is_the_teachers_memory() -> None:
    teacher, student = pair("ouro", ["gdn", "full", "window"])
    objective = AlignObjective(teacher, student)
    trained = {n for n, p in student.named_parameters() if p.requires_grad}
    assert trained and all(
        n.startswith(("model.layers.0.mixer.", "model.layers.2.mixer.")) for n in trained
    )
    assert objective.num_visits == 2 * 4 and objective.end_slot == 12
    in_groups = sum(p.numel() for g in objective.parameter_groups() for p in g["params"])
    assert in_groups == sum(p.numel() for p in student.parameters() if p.requires_grad)
    own = {p.data_ptr() for p in teacher.parameters()}
    kept = [p for n, p in student.named_parameters() if n not in trained]
    assert all(p.data_ptr() in own for p in kept)
    before = {n: p.clone() for n, p in teacher.named_parameters()}
    objective.train_step(packed(), lambda loss: loss.backward(), 0.0)
    assert all(p.grad is None for p in teacher.parameters())
    assert all(torch.equal(p, before[n]) for n, p in teacher.named_parameters())
    assert not any(layer.mixer._forward_hooks for layer in teacher.model.layers)


def test_the_teacher_stops_after_the_last_layer_that_trains() -> None:
    teacher, student = pair("llama")
    seen: list[int] = []
    for i, layer in enumerate(teacher.model.layers):
        layer.register_forward_hook(lambda *_, i=i: seen.append(i))
    AlignObjective(teacher, student, [0, 1]).train_step(packed(), lambda loss: loss.backward(), 0.0)
    assert seen == [0, 1]


def test_a_scaled_backward_scales_the_gradients() -> None:
    teacher, student = pair("llama")
    objective = AlignObjective(teacher, student)
    objective.train_step(packed(), lambda loss: loss.backward(), 0.0)
    whole = mixer_gradients(student)
    student.zero_grad()
    for _ in range(2):
        objective.train_step(packed(), lambda loss: (loss / 2).backward(), 0.0)
    for name, gradient in mixer_gradients(student).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-7, msg=name)


def test_one_layers_graph_at_a_time() -> None:
    """When a visit's backward runs, no activation of an earlier visit is alive."""
    teacher, student = pair("ouro")
    alive: set[int] = set()
    most = 0

    def backward(loss: Tensor) -> None:
        nonlocal most
        most = max(most, len(alive))
        loss.backward()

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        AlignObjective(teacher, student).train_step(packed(), backward, 0.0)
        of_twelve_visits = most
        most = 0
        AlignObjective(teacher, student, [0]).train_step(packed(), backward, 0.0)
    assert of_twelve_visits <= most + 8  # a few tensors more or less between layers, not 12 times


def test_a_window_that_covers_the_row_starts_without_error() -> None:
    teacher = tiny_model(tiny_spec("qwen3")).requires_grad_(False)
    student = build_student(teacher, ["window"] * 3, {"window_tokens": 64}, share=True)
    metrics = AlignObjective(teacher, student).train_step(packed(), lambda loss: None, 0.0)
    assert metrics["loss"].item() < 1e-10


@pytest.mark.parametrize("mixer", ["gdn", "deltanet", "kda", "mamba2", "retnet"])
@pytest.mark.parametrize("family", ["llama", "ouro"])
def test_calibration_gives_every_channel_the_teachers_size(family: str, mixer: str) -> None:
    teacher = tiny_model(tiny_spec(family)).requires_grad_(False)
    student = build_student(teacher, [mixer, "full", "window"], share=True)
    batches = [packed(padding=3), packed(rows=1)]
    inputs: list[Tensor] = []

    def keep_inputs(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(args[0][batch.keep_BT])

    handle = teacher.model.layers[0].mixer.o_proj.register_forward_pre_hook(keep_inputs)
    for batch in batches:
        teacher.model(
            batch.input_ids_BT, attention_mask=batch.keep_BT, segment_ids=batch.segment_ids_BT
        )
    handle.remove()
    calibrate(teacher, student, batches, [0, 2])
    weight = student.model.layers[0].mixer.out_norm_weight
    expected = torch.cat(inputs).square().mean(0).sqrt().view_as(weight)
    torch.testing.assert_close(weight, expected)
    assert not any(layer.mixer.o_proj._forward_pre_hooks for layer in teacher.model.layers)


def test_processes_share_the_mixers_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one writes and removes, whichever of them comes first or last."""
    teacher = tiny_model(tiny_spec())
    students = [build_student(teacher, ["gdn"] * 3, share=True) for _ in range(2)]
    before = {name: x.clone() for name, x in students[0].state_dict().items()}
    both = [Parking(student, tmp_path / "parked", torch.device("cpu")) for student in students]

    def in_turn(*ranks: int, method: str, layers: list[int]) -> None:
        for rank in ranks:
            monkeypatch.setenv("RANK", str(rank))
            getattr(both[rank], method)(layers)

    in_turn(1, 0, method="leave", layers=[0, 1, 2])
    in_turn(1, 0, method="fetch", layers=[1])
    in_turn(0, 1, method="leave", layers=[1])
    in_turn(1, 0, method="fetch", layers=[0, 1, 2])
    assert not list((tmp_path / "parked").iterdir())
    for name, x in students[0].state_dict().items():
        assert torch.equal(x, before[name]) and x.shape == students[1].state_dict()[name].shape
