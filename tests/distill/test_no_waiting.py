"""Inside a step nothing looks at a value: on the meta device, where there are none, that raises."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec, tokens
from torch import Tensor

from ltconvert.convert.students.blocks import run_layer
from ltconvert.convert.students.dreamer import grouped
from ltconvert.convert.transfer import build_student
from ltconvert.distill.align import AlignObjective
from ltconvert.distill.data import Batch
from ltconvert.distill.gradients import BAD, NORM, Gradients
from ltconvert.distill.logits import LogitsObjective
from ltconvert.kernels import dispatch
from ltconvert.recipes.stages import LogitsSettings

LENGTH = 256


def packed() -> Batch:
    """Two documents a row, no padding."""
    ids_BT = tokens(2, LENGTH)
    segments_BT = (torch.arange(LENGTH) >= 99).int().repeat(2, 1)
    return Batch(ids_BT, segments_BT, ids_BT.roll(-1, 1), torch.ones(2, LENGTH, dtype=torch.bool))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a GPU, of which meta tensors run the part that gives shapes."""
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "choose", lambda op, *_: ("triton", "a test"))
    autocast = "ltconvert.kernels.linear_kl.triton._autocast"
    monkeypatch.setattr(autocast, lambda tensor: None)  # of which meta knows nothing


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("stage", ["align", "logits"])
@pytest.mark.parametrize(
    ("family", "mixers"),
    [
        *((family, ["gdn", "full", "window"]) for family in ("llama", "ouro", "gemma2")),
        *((family, ["dsa", "nsa", "dsa"]) for family in ("llama", "ouro", "gemma2")),
        ("llama", ["kda", "mamba2", "retnet"]),
        ("gemma2", ["moda", "gdn", "moda"]),
    ],
)
def test_a_step_waits_for_nothing(stage: str, family: str, mixers: list[str]) -> None:
    teacher = tiny_model(tiny_spec(family, head_dim=16)).requires_grad_(False)
    options = {"window_tokens": 100, "top_k_tokens": 100, "chosen_blocks": 2}
    student = build_student(teacher, mixers, options, share=stage == "align")
    teacher, student = teacher.to("meta"), student.to("meta")
    objective: Any = (
        AlignObjective(teacher, student)
        if stage == "align"
        else LogitsObjective(teacher, student, LogitsSettings(ce_weight=0.5))
    )
    values = objective.train_step(packed().to("meta"), lambda loss: loss.backward(), 0.0)
    parameters = {n: p for n, p in student.named_parameters() if p.requires_grad}
    gradients = Gradients(parameters, torch.optim.SGD(parameters.values(), lr=1.0))
    found = gradients.clip(1.0)
    gradients.guard(values["loss"], found[NORM])
    assert found[BAD].shape == ()
    with pytest.raises((RuntimeError, NotImplementedError)):
        float(values["loss"])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("kind", "nulls"),
    [("full", 0), ("gdn", 0), ("gdn_window", 0), ("full", 1)],
)
def test_routing_waits_for_nothing(kind: str, nulls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_has_kernel", lambda weight: True)
    monkeypatch.setattr(torch, "_grouped_mm", shapes_of_grouped_products)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # as above
    monkeypatch.setattr(torch, "autocast", lambda kind, enabled: nullcontext())
    teacher = tiny_model(tiny_spec("qwen3", head_dim=16), [kind] * 3).requires_grad_(False)
    dreamer = {"entries": 3, "experts": 6, "slices": 2, "top_experts": 3}
    dreamer |= {"null_entries": nulls, "null_experts": 2 * nulls}
    student = build_student(teacher, [kind] * 3, {"dreamer": dreamer})
    objective = LogitsObjective(teacher.to("meta"), student.to("meta"), LogitsSettings())
    for progress in (0.0, 0.3, 0.9):
        values = objective.train_step(packed().to("meta"), lambda loss: loss.backward(), progress)
        assert values["max_load"].shape == ()


def shapes_of_grouped_products(x_MI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """In fp32 as well; PyTorch's own wants half precision on this device."""
    assert ends_E.shape == weight_EIO.shape[:1] and ends_E.dtype == torch.int32
    return x_MI @ weight_EIO.sum(0)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_bounds_of_documents_wait_for_nothing() -> None:
    model = tiny_model(tiny_spec("gemma2")).to("meta").model
    model.call_layer = lambda layer, h_BTC, context: run_layer(layer, h_BTC, context)
    batch = packed().to("meta")
    context = model.context(
        model.embed(batch.input_ids_BT), attention_mask=None, segment_ids=batch.segment_ids_BT
    )
    assert set(context._made) == {"bounds"}  # no mask
