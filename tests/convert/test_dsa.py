"""Chosen tokens: the teacher where all are chosen, a window at first, an indexer that learns."""

from __future__ import annotations

import pytest
import torch
from helpers import FAMILIES, tiny_model, tiny_spec, tokens

from ltconvert.convert.mixers.attention import Attention
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.transfer import build_student
from ltconvert.distill.align import AlignObjective
from ltconvert.distill.data.batch import Batch
from ltconvert.distill.logits import LogitsObjective
from ltconvert.kernels.index_topk import index_topk
from ltconvert.kernels.sparse_attention.bits import unpack
from ltconvert.recipes.stages import LogitsSettings

TOP_K = 6


def pair(family: str = "llama", loops: int = 1, top_k: int = TOP_K, **options: object):  # type: ignore[no-untyped-def]
    teacher = tiny_model(tiny_spec(family, num_loops=loops)).double().requires_grad_(False)
    return teacher, build_student(teacher, ["dsa"] * 3, {"top_k_tokens": top_k}, **options)


def batch_of(ids: torch.Tensor, keep: torch.Tensor | None = None) -> Batch:
    keep = torch.ones_like(ids, dtype=torch.bool) if keep is None else keep
    return Batch(ids, torch.zeros_like(ids), ids, keep)


def index_parameters(model: LT2ForCausalLM) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if ".index_" in name]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loops", [1, 2, 3, 4])
def test_where_all_tokens_are_chosen_it_is_the_teacher(family: str, loops: int) -> None:
    teacher, student = pair(family, loops, top_k=15)
    ids = tokens(2, 15)
    with torch.no_grad():
        assert torch.equal(student(ids).logits, teacher(ids).logits)
        narrow = pair(family, loops)[1]
        for layer in narrow.model.layers:  # whatever the indexer says
            layer.mixer.index_weight_proj.weight.normal_()
        found, wanted = narrow(ids).logits, teacher(ids).logits
    torch.testing.assert_close(found[:, :TOP_K], wanted[:, :TOP_K], atol=1e-9, rtol=1e-9)
    assert (found[:, TOP_K:] - wanted[:, TOP_K:]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_it_begins_as_a_window(family: str) -> None:
    teacher, student = pair(family, 2)
    window = build_student(teacher, ["window"] * 3, {"window_tokens": TOP_K})
    ids = tokens(2, 17)
    with torch.no_grad():
        torch.testing.assert_close(student(ids).logits, window(ids).logits, atol=1e-9, rtol=1e-9)


def test_choosing_by_the_attention_itself_beats_the_window() -> None:
    """An indexer of one head whose products are the attention's own chooses its largest weights."""
    spec = tiny_spec("llama", num_attention_heads=1, num_key_value_heads=1)
    teacher = tiny_model(spec).double()
    student = build_student(teacher, ["dsa"] * 3, {"top_k_tokens": TOP_K, "index_heads": 1})
    mixer = student.model.layers[0].mixer
    x = torch.randn(2, 19, 32, dtype=torch.float64)
    context = student.model.context(x)
    q, k, weight = mixer.index(x, context)
    scores = (q.transpose(1, 2) @ k[:, None].mT).relu()[:, 0]
    bits = index_topk(q, k, torch.ones_like(weight), TOP_K)
    chosen = unpack(bits[:, 0], 19)
    future = torch.ones(19, 19, dtype=torch.bool).triu(1)
    best = scores.masked_fill(future, -1.0).topk(TOP_K, dim=-1).values.sum(-1)
    torch.testing.assert_close((scores * chosen).sum(-1)[:, TOP_K:], best[:, TOP_K:])


@pytest.mark.parametrize("family", ["llama", "gemma2", "ouro"])
def test_the_loss_of_the_choice_reaches_the_indexer_alone(family: str) -> None:
    teacher, student = pair(family, 2)
    for p in index_parameters(student):
        torch.nn.init.normal_(p)
    student.requires_grad_(True)
    ids = tokens(2, 15)
    loss = student.model(ids, learns_choice=True).choice_loss
    loss.backward()
    own = {id(p) for p in index_parameters(student)}
    for name, p in student.named_parameters():
        assert (p.grad is not None and bool(p.grad.any())) == (id(p) in own), name
    assert student.model(ids).choice_loss is None
    assert teacher.model(ids, learns_choice=True).choice_loss is None


def test_aligning_teaches_the_indexer_all_keys() -> None:
    """The divergence falls, and what is chosen holds more of the attention."""
    teacher, student = pair("ouro", 2, share=True)
    with torch.no_grad():
        for layer in student.model.layers:
            layer.mixer.index_q_proj.weight.normal_(std=0.2)
            layer.mixer.index_k_proj.weight.normal_(std=0.2)
    objective = AlignObjective(teacher, student)
    optimizer = torch.optim.Adam(index_parameters(student), lr=1e-2)
    batch = batch_of(tokens(4, 24))
    seen = []
    for _ in range(60):
        values = objective.train_step(batch, lambda loss: loss.backward(), 0.0)
        optimizer.step()
        student.zero_grad()
        seen.append((float(values["choice"]), float(values["loss"] - values["choice"])))
    assert seen[-1][0] < 0.6 * seen[0][0]
    assert seen[-1][1] < 0.9 * seen[0][1]  # the error of what is attended to


def test_rows_that_are_all_chosen_still_teach_the_indexer() -> None:
    teacher, student = pair("llama", top_k=64, share=True)
    values = AlignObjective(teacher, student).train_step(
        batch_of(tokens(2, 12)), lambda loss: loss.backward(), 0.0
    )
    assert float(values["loss"] - values["choice"]) < 1e-12 < float(values["choice"])
    assert all(layer.mixer.index_weight_proj.weight.grad.any() for layer in student.model.layers)


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_the_stage_logits_adds_the_loss_over_what_was_chosen(weight: float) -> None:
    teacher, student = pair("ouro", 2)
    for p in index_parameters(student):
        torch.nn.init.normal_(p)
    settings = LogitsSettings(choice_weight=weight, loop_warmup_share=0.0)
    keep = torch.ones(2, 15, dtype=torch.bool)
    keep[1, 12:] = False
    batch = batch_of(tokens(2, 15), keep)
    found = []
    for checkpointing in (False, True):
        student.train().model.gradient_checkpointing = checkpointing
        objective = LogitsObjective(teacher, student, settings)
        values = objective.train_step(batch, lambda loss: loss.backward(), 0.5)
        found.append([p.grad.clone() for p in index_parameters(student)])
        student.zero_grad()
        torch.testing.assert_close(values["loss"], values["kl"] + weight * values["choice"])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    alone = student.model(batch.input_ids_BT, attention_mask=keep, learns_choice=True).choice_loss
    torch.testing.assert_close(alone.detach(), values["choice"])
    wanted = torch.autograd.grad(weight * alone, index_parameters(student))
    for a, b in zip(found[0], wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_cropped_cache_forgets_the_indexers_keys_too() -> None:
    _, student = pair("ouro", 2)
    for p in index_parameters(student):
        torch.nn.init.normal_(p)
    ids = tokens(1, 20)
    with torch.no_grad():
        cache = student.new_cache()
        student(ids[:, :14], cache=cache)
        cache.crop(-4)
        again = student(ids[:, 10:], cache=cache).logits
        torch.testing.assert_close(again, student(ids).logits[:, 10:], atol=1e-6, rtol=1e-6)
        assert cache.layers[0].indexer_keys.shape[1] == 20
        cache.reset()
        torch.testing.assert_close(student(ids, cache=cache).logits, student(ids).logits)


def test_the_teachers_attention_is_inherited_whole() -> None:
    teacher, student = pair("qwen2")
    own, source = student.model.layers[1].mixer, teacher.model.layers[1].mixer
    assert isinstance(own, Attention)
    for name, value in source.state_dict().items():
        assert torch.equal(own.state_dict()[name], value)
