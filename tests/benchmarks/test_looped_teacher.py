"""A looped teacher trained from scratch at toy size: its loss, its files, its resumes, its use."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import VOCAB, scatter, tiny_model, tiny_spec, tokens
from lock_case import changed, holder
from pipeline_case import WORDS, convert
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from ltconvert.benchmarks.looped_model import at_loops, looped_spec, new_model, save_teacher
from ltconvert.benchmarks.looped_objective import LoopedObjective
from ltconvert.benchmarks.looped_teacher import main
from ltconvert.convert.students.lt2 import LT2ForCausalLM
from ltconvert.convert.teachers.load import load_teacher
from ltconvert.distill.compilation import Choice, compiled
from ltconvert.distill.data import Batch
from ltconvert.kernels import dispatch

STEPS, LOOPS = 4, 3
_IDS = tokens(2, 31)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A tokenizer and a text."""
    folder = tmp_path_factory.mktemp("case")
    tiny_tokenizer.save_pretrained(folder / "tokenizer")
    draw = random.Random(0)
    documents = (" ".join(draw.choices(WORDS.split(), k=draw.randint(5, 40))) for _ in range(80))
    lines = (json.dumps({"text": document}) for document in documents)
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


def train(case: Path, out: Path, *more: str) -> int:
    """Four steps of two micro-batches on the CPU in fp32; ``more`` options come last."""
    sizes = ["--layers", "2", "--heads", "1", "--mlp", "48", "--loops", str(LOOPS)]
    rows = ["--length", "48", "--rows", "2", "--batch-tokens", "192", "--tokens", str(STEPS * 192)]
    scores = ["--heldout-tokens", "240", "--recall-lengths", "320", "--recall-examples", "2"]
    text = ["--tokenizer", str(case / "tokenizer"), "--data", str(case / "text.jsonl")]
    where = ["--out", str(out), "--device", "cpu", "--precision", "fp32", "--heldout-share", "0.2"]
    return main([*sizes, *rows, *scores, *text, *where, *more])


@pytest.fixture(scope="module")
def trained(case: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "out"
    assert train(case, out) == 0
    return out


def weights(out: Path) -> dict[str, Tensor]:
    return load_file(out / "teacher" / "model.safetensors")


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def _batch() -> Batch:
    """Two rows of two documents each; a document's last token has no label."""
    segments_BT = torch.zeros_like(_IDS, dtype=torch.int32)
    segments_BT[0, 11:], segments_BT[1, 17:] = 1, 1
    labels_BT = _IDS.roll(-1, 1)
    labels_BT[0, 10] = labels_BT[1, 16] = -100
    return Batch(_IDS, segments_BT, labels_BT, torch.ones_like(_IDS, dtype=torch.bool), False)


def _whole_losses(model: LT2ForCausalLM, batch: Batch) -> list[Tensor]:
    """Cross-entropy after every loop, from whole logits."""
    output = model.model(batch.input_ids_BT, segment_ids=batch.segment_ids_BT)
    logits = (F.linear(h_BTC, model.lm_head.weight).flatten(0, 1) for h_BTC in output.loop_states)
    return [F.cross_entropy(z_NV, batch.labels_BT.flatten()) for z_NV in logits]


@pytest.mark.parametrize("every_loop", [True, False])
def test_loss_and_gradients_are_those_of_whole_logits(every_loop: bool) -> None:
    model = tiny_model(tiny_spec("ouro"))
    batch, got = _batch(), []
    objective = LoopedObjective(model, 1.0, every_loop=every_loop)
    losses = _whole_losses(model, batch)
    expected = torch.stack(losses).mean() if every_loop else losses[-1]
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(expected, trained)
    values = objective.train_step(batch, got.append, 0.0)
    got[0].backward()
    torch.testing.assert_close(values["loss"], expected.detach())
    shown = {f"ce{i + 1}": loss for i, loss in enumerate(losses) if every_loop or i == 3}
    assert values.keys() == {"loss"} | shown.keys()
    for name, loss in shown.items():
        torch.testing.assert_close(values[name], loss.detach())
    for parameter, gradient in zip(trained, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)


def test_compiled_layers_give_the_same_loss() -> None:
    model, batch, problems = tiny_model(tiny_spec("ouro")), _batch(), []
    objective = LoopedObjective(model, 1.0)
    plain = objective.train_step(batch, lambda loss: loss.backward(), 0.0)
    own_call = model.model.call_layer
    with compiled(objective, Choice(True, "a test"), problems.append, backend="aot_eager"):
        assert model.model.call_layer is not own_call
        found = objective.train_step(batch, lambda loss: loss.backward(), 0.0)
    assert model.model.call_layer is own_call and not problems
    torch.testing.assert_close(found, plain)


def test_a_step_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where there are no values, looking at one raises."""
    pytest.importorskip("triton")
    monkeypatch.setattr(dispatch, "choose", lambda op, *_: ("triton", "a test"))
    autocast = "ltconvert.kernels.linear_kl.triton._autocast"
    monkeypatch.setattr(autocast, lambda tensor: None)  # of which meta knows nothing
    objective = LoopedObjective(tiny_model(tiny_spec("ouro")).to("meta"), 1.0)
    values = objective.train_step(_batch().to("meta"), lambda loss: loss.backward(), 0.0)
    assert values["loss"].is_meta


def test_all_but_the_exit_gate_trains() -> None:
    objective = LoopedObjective(tiny_model(tiny_spec("ouro")), 0.5)
    (group,) = objective.parameter_groups()
    assert group["lr"] == 0.5
    trained = {id(p) for p in group["params"]}
    left = {n for n, p in objective.module.named_parameters() if id(p) not in trained}
    assert left == {"model.exit_gate.weight", "model.exit_gate.bias"}


def test_a_new_model_is_that_of_its_seed_and_its_branches_add_up_to_1(
    tiny_tokenizer: Any,
) -> None:
    spec = looped_spec(tiny_tokenizer, layers=3, heads=1, loops=2, mlp=None)
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (64, 256, VOCAB)
    model = new_model(spec, 7)
    assert same(dict(model.state_dict()), dict(new_model(spec, 7).state_dict()))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    with torch.no_grad():
        h_BTC = model.model.embed(_IDS)
        context = model.model.context(h_BTC)
        added = sum(
            layer(h_BTC, context).sub(h_BTC).square().mean() for layer in model.model.layers
        )
    assert added.item() == pytest.approx(1.0, rel=0.3)


def test_fewer_loops_are_the_states_on_the_way() -> None:
    model = tiny_model(tiny_spec("ouro")).requires_grad_(False)
    states = model.model(_IDS).loop_states
    for loops in (1, 2, 3, 4):
        shorter = at_loops(model, loops)
        assert shorter.config.num_loops == loops
        assert torch.equal(shorter.model(_IDS).last_hidden_state, states[loops - 1])
        shared = shorter.model.layers[0].mixer.q_proj.weight
        assert shared.data_ptr() == model.model.layers[0].mixer.q_proj.weight.data_ptr()


def test_the_saved_teacher_is_the_live_one(tmp_path: Path, tiny_tokenizer: Any) -> None:
    spec = looped_spec(tiny_tokenizer, layers=2, heads=1, loops=LOOPS, mlp=48)
    model = new_model(spec, 0).eval()
    scatter(model)
    save_teacher(model, tiny_tokenizer, tmp_path / "teacher")
    teacher = load_teacher(str(tmp_path / "teacher"))
    assert teacher.spec == model.model.spec and not teacher.remarks
    assert same(dict(teacher.model.state_dict()), dict(model.state_dict()))
    with torch.no_grad():  # other places in memory may round the last bit differently
        live, loaded = model(_IDS), teacher.model(_IDS)
    torch.testing.assert_close(loaded.logits, live.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(loaded.exit_logits, live.exit_logits, atol=1e-5, rtol=0)
    assert teacher.tokenizer("the dog").input_ids == tiny_tokenizer("the dog").input_ids


def test_what_a_run_leaves(trained: Path) -> None:
    saved = load_file(trained / "checkpoint" / "parameters.safetensors")
    model = load_teacher(str(trained / "teacher")).model
    for name, parameter in model.named_parameters():
        assert "exit_gate" in name or torch.equal(parameter, saved[name]), name
    noted = [json.loads(x) for x in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in noted] == list(range(1, STEPS + 1))
    assert noted[-1]["loss"] < noted[0]["loss"] - 0.3
    scores = json.loads((trained / "scores.json").read_text())
    assert list(scores) == [str(loops + 1) for loops in range(LOOPS)]
    for found in scores.values():
        assert found["loss"] < noted[0]["loss"] and set(found["recall"]["needle"]) == {"320"}


def test_a_finished_run_is_only_scored_again(
    case: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = weights(trained), json.loads((trained / "scores.json").read_text())
    assert train(case, trained) == 0
    assert same(weights(trained), before[0])
    assert json.loads((trained / "scores.json").read_text()) == before[1]
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[0].startswith("| loops | held-out loss | perplexity | needle 320 | multikey 320 |")
    assert [row.split(" | ")[0] for row in rows[1:]] == ["| 1", "| 2", "| 3"]


def test_out_of_time_again_and_again_ends_as_undisturbed(
    case: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each call does one step, then saves and scores a teacher; the last one has all its time."""
    out = tmp_path / "out"
    for done in (1, 2):
        assert train(case, out, "--minutes", "0") == 0
        assert f"stopped after step {done} of {STEPS} of stage looped" in capsys.readouterr().out
        assert (out / "scores.json").exists() and not same(weights(out), weights(trained))
    assert train(case, out) == 0
    assert same(weights(out), weights(trained))


def _signal_in_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real, calls = LoopedObjective.train_step, [0]

    def train_step(self: Any, batch: Batch, backward: Callable[..., None], progress: float) -> Any:
        calls[0] += 1
        if calls[0] == 2 * number:
            signal.raise_signal(signal.SIGTERM)
        return real(self, batch, backward, progress)

    monkeypatch.setattr(LoopedObjective, "train_step", train_step)


def test_a_signal_ends_it_at_once_and_the_same_command_goes_on(
    case: Path,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    _signal_in_step(monkeypatch, 3)
    assert train(case, out, "--minutes", "60") == 130
    assert "stopped after step 3 of 4" in capsys.readouterr().err
    assert not (out / "teacher").exists()
    monkeypatch.undo()
    assert train(case, out) == 0
    assert same(weights(out), weights(trained))


@pytest.mark.parametrize(
    ("option", "field"),
    [("--loops 2", "model.num_loops = 3"), ("--loss last", "loss = mean"), ("--lr 1", "train.lr")],
)
def test_a_folder_of_another_run_is_refused(
    case: Path, trained: Path, capsys: pytest.CaptureFixture[str], option: str, field: str
) -> None:
    before = weights(trained)
    assert train(case, trained, *option.split()) == 2
    said = capsys.readouterr().err
    assert field in said and said.count("\n") == 1
    assert same(weights(trained), before)


def test_a_changed_text_and_a_second_call_are_refused(
    case: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = weights(trained)
    with changed(case / "text.jsonl"):
        assert train(case, trained) == 2
    assert "content of data.source" in capsys.readouterr().err
    with holder(trained):
        assert train(case, trained) == 2
    assert "at work in it" in capsys.readouterr().err
    assert same(weights(trained), before)


def test_a_tokenizer_whose_special_ids_are_not_ouros(
    case: Path, tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    core = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    moved = json.dumps(core).replace("<|im_end|>", "<|end_of_turn|>")
    (tmp_path / "tokenizer.json").write_text(moved)
    PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")).save_pretrained(
        tmp_path
    )
    assert train(case, tmp_path / "out", "--tokenizer", str(tmp_path)) == 2
    assert "<|im_end|> is None, Ouro's layout needs 2" in capsys.readouterr().err
    assert train(case, tmp_path / "out", "--tokenizer", str(case / "nothing")) == 2


def test_distill_starts_from_it(case: Path, trained: Path, tmp_path: Path) -> None:
    teacher = load_teacher(str(trained / "teacher"))
    off, keep = {"enabled": False}, {"full_layers": [0]}
    result = convert(teacher, case, tmp_path / "run", student=keep, select=off, longctx=off)
    assert [row["stage"] for row in result.rows] == ["start", "align", "logits"]
    assert result.student.config.num_loops == LOOPS
    kl = [row["kl"] for row in result.rows]
    assert kl[-1] < kl[0]
