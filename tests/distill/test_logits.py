"""Stage `logits`: the loss against whole logits, masks, loops, learning rates, starting point."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens
from torch import Tensor
from torch.nn import functional as F

from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.distill.data import Batch
from ltconvert.distill.logits import LogitsObjective, frozen_copy
from ltconvert.recipes.stages import LogitsSettings, LongctxSettings


def packed(rows: int = 2, length: int = 19, padding: int = 0) -> Batch:
    """Random rows of two documents each, the last ``padding`` tokens of the last row padded."""
    ids_BT = tokens(rows, length)
    segments_BT = (torch.arange(length) >= 8).int().repeat(rows, 1)
    keep_BT = torch.ones(rows, length, dtype=torch.bool)
    if padding:
        keep_BT[-1, -padding:] = False
        segments_BT[-1, -padding:] = 2
    labels_BT = torch.where(segments_BT == segments_BT.roll(-1, 1), ids_BT.roll(-1, 1), -100)
    labels_BT[:, -1] = 5
    labels_BT[~keep_BT] = -100
    return Batch(ids_BT, segments_BT, labels_BT, keep_BT)


def pair(family: str, mixers: list[str] | None = None) -> tuple[LT2ForCausalLM, LT2ForCausalLM]:
    """A random teacher and a student of its own tensors, all of them moved a little."""
    teacher = tiny_model(tiny_spec(family)).requires_grad_(False)
    student = build_student(teacher, mixers or ["gdn", "full", "gdn"])
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return teacher, student


def whole_logits(model: LT2ForCausalLM, batch: Batch, loop: int = -1) -> Tensor:
    """fp64 logits of one loop at every kept token."""
    output = model.model(
        batch.input_ids_BT, attention_mask=batch.keep_BT, segment_ids=batch.segment_ids_BT
    )
    return model.logits(output.loop_states[loop])[batch.keep_BT].double()


def whole_divergence(student_NV: Tensor, teacher_NV: Tensor, settings: LogitsSettings) -> Tensor:
    """The divergence written out, times the temperature squared."""
    s = (student_NV / settings.temperature).log_softmax(-1)
    t = (teacher_NV / settings.temperature).log_softmax(-1)
    if settings.divergence == "forward":
        kl = (t.exp() * (t - s)).sum(-1)
    elif settings.divergence == "reverse":
        kl = (s.exp() * (s - t)).sum(-1)
    else:
        beta = settings.jsd_beta
        m = (beta * t.exp() + (1 - beta) * s.exp()).log()
        kl = beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)
    return settings.temperature**2 * kl.mean()


def settings_of(**changes: object) -> LogitsSettings:
    return LogitsSettings(**{"loop_warmup_share": 0.0, **changes})


def step(objective: LogitsObjective, batch: Batch, progress: float = 0.5) -> dict[str, Tensor]:
    return objective.train_step(batch, lambda loss: loss.backward(), progress)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_those_of_whole_logits(family: str) -> None:
    teacher, student = pair(family)
    batch = packed(padding=3)
    settings = settings_of(ce_weight=0.3, kl_weight=0.7, temperature=1.7)
    metrics = step(LogitsObjective(teacher, student, settings), batch)
    chunked = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    student_NV = whole_logits(student, batch)
    kl = whole_divergence(student_NV, whole_logits(teacher, batch), settings)
    labels_N = batch.labels_BT[batch.keep_BT]
    ce = F.cross_entropy(student_NV, labels_N, ignore_index=-100, reduction="sum") / len(labels_N)
    loss = 0.7 * kl + 0.3 * ce
    loss.backward()
    assert metrics["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["ce"].item() == pytest.approx(ce.item(), rel=1e-5)
    whole = {n: p.grad for n, p in student.named_parameters() if p.grad is not None}
    assert chunked.keys() == whole.keys()
    for name, gradient in whole.items():
        torch.testing.assert_close(chunked[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_every_divergence(divergence: str) -> None:
    teacher, student = pair("llama")
    settings = settings_of(divergence=divergence, jsd_beta=0.3, temperature=2.0)
    metrics = step(LogitsObjective(teacher, student, settings), packed())
    expected = whole_divergence(
        whole_logits(student, packed()), whole_logits(teacher, packed()), settings
    )
    assert metrics["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_that_keeps_every_layer_starts_at_zero(family: str) -> None:
    teacher = tiny_model(tiny_spec(family)).requires_grad_(False)
    student = build_student(teacher, ["full"] * 3, {"sdpa_gate": True, "loop_residual": True})
    settings = settings_of(loop_warmup_share=1.0)
    metrics = step(LogitsObjective(teacher, student, settings), packed(padding=2))
    assert abs(metrics["loss"].item()) < 1e-6
    largest = max(float(p.grad.abs().max()) for p in student.parameters() if p.grad is not None)
    assert largest < 1e-5


def test_every_token_counts_and_padding_does_not() -> None:
    """A change of any token's teacher distribution, the last one's too, changes the loss."""
    teacher, student = pair("qwen3")
    objective = LogitsObjective(teacher, student, settings_of())
    base = step(objective, packed(padding=3))["loss"]
    for position in (0, 7, 18):
        batch = packed(padding=3)
        batch.input_ids_BT[0, position] = 1 + batch.input_ids_BT[0, position] % 90
        assert step(objective, batch)["loss"] != base
    batch = packed(padding=3)
    batch.input_ids_BT[1, -3:] = 77
    torch.testing.assert_close(step(objective, batch)["loss"], base, rtol=0, atol=1e-7)


def test_documents_of_a_row_do_not_see_each_other() -> None:
    teacher, student = pair("llama")
    objective = LogitsObjective(teacher, student, settings_of())
    both = packed()
    parts = [
        Batch(*(getattr(both, name)[:, part] for name in _FIELDS))
        for part in (slice(0, 8), slice(8, 19))
    ]
    apart = [step(objective, part)["kl"].item() for part in parts]
    expected = (8 * apart[0] + 11 * apart[1]) / 19
    assert step(objective, both)["kl"].item() == pytest.approx(expected, rel=1e-5)


_FIELDS = ("input_ids_BT", "segment_ids_BT", "labels_BT", "keep_BT")


def test_warm_up_adds_the_kl_of_every_loop_then_only_the_last_counts() -> None:
    teacher, student = pair("ouro")
    batch, settings = packed(), settings_of(loop_warmup_share=0.25, ce_weight=0.5)
    objective = LogitsObjective(teacher, student, settings)
    kls = [
        whole_divergence(whole_logits(student, batch, t), whole_logits(teacher, batch, t), settings)
        for t in range(4)
    ]
    early, late = step(objective, batch, 0.2), step(objective, batch, 0.25)
    assert len({round(kl.item(), 6) for kl in kls}) == 4
    assert late["kl"].item() == pytest.approx(kls[3].item(), rel=1e-5)
    assert early["kl"].item() == pytest.approx(kls[3].item(), rel=1e-5)
    assert (early["loss"] - late["loss"]).item() == pytest.approx(sum(kls[:3]).item(), rel=1e-5)


def test_a_student_with_fewer_loops_has_no_loop_warm_up() -> None:
    teacher = tiny_model(tiny_spec("ouro")).requires_grad_(False)
    student = build_student(teacher, ["full"] * 3, {"loops": 2})
    objective = LogitsObjective(teacher, student, settings_of(loop_warmup_share=1.0))
    batch = packed()
    expected = whole_divergence(
        whole_logits(student, batch), whole_logits(teacher, batch), objective.settings
    )
    assert step(objective, batch, 0.0)["loss"].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "ouro"])
def test_converted_mixers_have_their_own_learning_rate(family: str) -> None:
    teacher, student = pair(family, ["gdn", "full", "window"])
    objective = LogitsObjective(teacher, student, settings_of(lr=1.0, mixer_lr=2.0))
    groups = {group["name"]: group for group in objective.parameter_groups()}
    assert groups["mixers"]["lr"] == 2.0 and groups["rest"]["lr"] == 1.0
    layers = student.model.layers
    mixers = {id(p) for i in (0, 2) for p in layers[i].mixer.parameters()}
    assert {id(p) for p in groups["mixers"]["params"]} == mixers
    everything = [p for group in groups.values() for p in group["params"]]
    trained = [p for p in student.parameters() if p.requires_grad]
    assert len(everything) == len(trained) == len({id(p) for p in everything})
    step(objective, packed())
    assert all(p.grad is not None for p in trained)  # nothing that only weight decay would touch
    assert all(p.grad is None for p in teacher.parameters())


def test_no_group_is_empty() -> None:
    teacher, student = pair("llama", ["full"] * 3)
    names = [g["name"] for g in LogitsObjective(teacher, student, settings_of()).parameter_groups()]
    assert names == ["rest"]


def test_longctx_settings_mix_cross_entropy() -> None:
    teacher, student = pair("llama")
    settings = LongctxSettings()
    metrics = step(LogitsObjective(teacher, student, settings), packed())
    expected = settings.kl_weight * metrics["kl"] + settings.ce_weight * metrics["ce"]
    torch.testing.assert_close(metrics["loss"], expected)


def test_rows_one_by_one_are_the_rows_at_once() -> None:
    """Rows with more ends of documents in them weigh as others do."""
    teacher, student = pair("llama")
    batch = packed(rows=2)
    batch.segment_ids_BT[0] = torch.arange(19) // 3
    ends_BT = batch.segment_ids_BT != batch.segment_ids_BT.roll(-1, 1)
    batch.labels_BT[ends_BT] = -100
    objective = LogitsObjective(teacher, student, settings_of(ce_weight=0.5, kl_weight=0.5))
    whole = step(objective, batch)
    at_once = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    tensors = batch.input_ids_BT, batch.segment_ids_BT, batch.labels_BT, batch.keep_BT
    rows = [Batch(*(x[i : i + 1] for x in tensors)) for i in range(2)]
    parts = [objective.train_step(row, lambda x: (x / 2).backward(), 0.5) for row in rows]
    for name, value in whole.items():
        torch.testing.assert_close(sum(part[name] for part in parts) / 2, value, msg=name)
    for name, parameter in student.named_parameters():
        if name in at_once:
            torch.testing.assert_close(parameter.grad, at_once[name], atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "ouro", "gemma3"])
def test_a_frozen_copy_gives_the_same_bits_under_autocast(family: str) -> None:
    model = tiny_model(tiny_spec(family)).requires_grad_(False)
    copied = frozen_copy(model, torch.bfloat16)
    batch = packed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [
            m.model(batch.input_ids_BT, segment_ids=batch.segment_ids_BT) for m in (model, copied)
        ]
    assert torch.equal(outputs[0].last_hidden_state, outputs[1].last_hidden_state)
    assert copied.model.layers[0].mixer.q_proj.weight.dtype == torch.bfloat16
    assert model.model.layers[0].mixer.q_proj.weight.dtype == torch.float32
    own = {p.data_ptr() for p in model.parameters()}
    assert copied.model.embed_tokens.weight.data_ptr() in own
    assert copied.model.norm.weight.data_ptr() in own
