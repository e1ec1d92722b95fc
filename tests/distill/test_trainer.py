"""The training loop in one process: arithmetic, schedule, errors, settings of a resume."""

from __future__ import annotations

import copy
import errno
import json
import math
import re
import signal
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec
from safetensors.torch import load_file
from toy_training import (
    SEQ,
    ToyModel,
    ToyObjective,
    make_settings,
    make_stream,
    run_toy,
    write_corpus,
)

from ltconvert.convert.transfer import build_student
from ltconvert.distill import readings, resume
from ltconvert.distill.data.tokens import Encoder
from ltconvert.distill.gradients import Gradients
from ltconvert.distill.interrupt import OutOfTime, Stopped
from ltconvert.distill.optim import build_optimizer, lr_share, plan_steps
from ltconvert.distill.precision import pick_precision
from ltconvert.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus.jsonl")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_equals_a_loop_written_out(folder: Path, tiny_tokenizer: Any) -> None:
    """Accumulation, clipping, schedule and groups against plain torch.optim.AdamW."""
    settings = make_settings(steps=7, clip_norm=0.05)
    torch.manual_seed(5)
    model = ToyModel(dropout=0.0)
    plain = copy.deepcopy(model)
    result = run_toy(folder, tiny_tokenizer, settings, objective=ToyObjective(model))[1]

    weights = [plain.embed.weight, plain.hidden.weight, plain.hidden.bias]
    peaks, decays = [1e-2, 3e-2, 3e-2], [0.01, 0.01, 0.0]
    optimizer = torch.optim.AdamW(
        [{"params": [w], "weight_decay": d} for w, d in zip(weights, decays, strict=True)],
        betas=(0.9, 0.95),
        fused=False,
        foreach=False,
    )
    stream = make_stream(tiny_tokenizer, folder.parent / "corpus.jsonl")
    warmup = 2  # 20 % of 7, rounded up
    for step in range(7):
        for batch in islice(stream, 2):
            logits = plain(batch.input_ids_BT)
            ce = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels_BT.flatten(), reduction="sum"
            ) / (2 * SEQ)
            loss = ce + 1e-3 * plain.embed(batch.input_ids_BT).square().mean()
            (loss / 2).backward()
        norm = torch.linalg.vector_norm(torch.cat([w.grad.flatten() for w in weights]))
        assert norm > 0.05
        done = (step - warmup) / (7 - 1 - warmup)
        share = (step + 1) / 2 if step < warmup else 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
        for weight, group, peak in zip(weights, optimizer.param_groups, peaks, strict=True):
            weight.grad *= 0.05 / norm
            group["lr"] = peak * share
        optimizer.step()
        optimizer.zero_grad()
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=1e-6, rtol=1e-5)
    assert result.steps == 7 and result.tokens == 7 * 2 * 2 * SEQ
    assert result.metrics["lr"] == pytest.approx(1e-3)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 8))
    assert records[-1]["loss"] == pytest.approx(result.metrics["loss"])
    assert {"stage", "step", "loss", "ce", "lr", "grad_norm", "tokens"} == set(records[0])


def test_only_matrices_decay() -> None:
    """Not the identity of a convolution, a norm by head and channel, a residual by loop."""
    teacher = tiny_model(tiny_spec("ouro", num_loops=2, qkv_bias=True))
    options = {"loop_residual": True, "sdpa_gate": True}
    student = build_student(teacher, ["gdn", "full", "window"], options)
    settings = make_settings(weight_decay=0.1)
    group = {"name": "all", "params": list(student.parameters()), "lr": 1.0}
    optimizer = build_optimizer([group], settings, student)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    seen = [p for g in optimizer.param_groups for p in g["params"]]
    assert len(seen) == len({id(p) for p in seen}) == len(list(student.parameters()))
    for name, parameter in student.named_parameters():
        matrix = re.search(r"(_proj|embed_tokens|lm_head|exit_gate)\.weight$", name) is not None
        assert (id(parameter) in decayed) == matrix, name


def test_what_a_step_has_not_used_has_a_gradient_of_0() -> None:
    """As in several processes, which all take part: Adam counts its steps alike."""
    used, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([used, unused])
    used.grad = torch.ones(3)
    Gradients({"used": used, "unused": unused}, optimizer).average()
    assert torch.equal(used.grad, torch.ones(3)) and torch.equal(unused.grad, torch.zeros(3))
    optimizer.step()
    assert optimizer.state[unused]["step"] == 1


def test_progress_runs_from_0_to_below_1(folder: Path, tiny_tokenizer: Any) -> None:
    objective, _ = run_toy(folder, tiny_tokenizer, make_settings(steps=4))
    assert objective.progress == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_learning_rate_schedule(schedule: str) -> None:
    settings = make_settings(schedule=schedule, warmup_share=0.1, final_lr_share=0.2)
    shares = [lr_share(step, 100, settings) for step in range(100)]
    assert shares[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert shares[10] == 1.0
    assert shares[-1] == pytest.approx(1.0 if schedule == "constant" else 0.2)
    middle = shares[10 + 44 : 10 + 46]
    if schedule != "constant":
        assert sum(middle) / 2 == pytest.approx(0.6)
        assert shares[10:] == sorted(shares[10:], reverse=True)
    for steps in (1, 2, 3):
        assert all(0 < lr_share(step, steps, settings) <= 1 for step in range(steps))


def test_budget_is_cut_into_whole_micro_batches() -> None:
    settings = make_settings(
        budget_tokens=1000, batch_tokens=200, micro_batch_rows=2, seq_len_tokens=20
    )
    plan = plan_steps(settings)
    assert (plan.accumulation, plan.step_tokens, plan.steps) == (5, 200, 5)
    plan = plan_steps(settings, world=2)
    assert (plan.accumulation, plan.step_tokens, plan.steps) == (2, 160, 7)
    one_row = make_settings(
        budget_tokens=100, batch_tokens=20, micro_batch_rows=1, seq_len_tokens=20
    )
    plan = plan_steps(one_row, world=8)  # more processes than the batch has rows
    assert (plan.accumulation, plan.step_tokens, plan.steps) == (1, 160, 1)


def test_frozen_and_tied_parameters(folder: Path, tiny_tokenizer: Any) -> None:
    torch.manual_seed(5)
    start = ToyModel().state_dict()
    objective, _ = run_toy(folder, tiny_tokenizer, make_settings(steps=2))
    assert torch.equal(objective.module.frozen.weight, start["frozen.weight"])
    assert not torch.equal(objective.module.embed.weight, start["embed.weight"])
    assert objective.module.head.weight is objective.module.embed.weight
    saved = load_file(folder / "stage" / "checkpoint" / "parameters.safetensors")
    assert set(saved) == {"embed.weight", "hidden.weight", "hidden.bias"}


def test_finished_stage_is_read_back_without_a_step(folder: Path, tiny_tokenizer: Any) -> None:
    first, before = run_toy(folder, tiny_tokenizer, make_settings())
    again, after = run_toy(folder, tiny_tokenizer, make_settings())
    assert again.calls == 0 and before == after
    for a, b in zip(first.module.parameters(), again.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bf16_autocast_keeps_fp32_weights(folder: Path, tiny_tokenizer: Any) -> None:
    objective, result = run_toy(
        folder, tiny_tokenizer, make_settings(steps=6), precision="bf16", dropout=0.0
    )
    assert {p.dtype for p in objective.module.parameters()} == {torch.float32}
    other = folder.parent / "other"
    _, exact = run_toy(other, tiny_tokenizer, make_settings(steps=6), dropout=0.0)
    assert result.metrics["loss"] != exact.metrics["loss"]
    assert result.metrics["loss"] == pytest.approx(exact.metrics["loss"], rel=0.02)


class _Breaks(ToyObjective):
    """A loss, or only a gradient, that is not finite from the second step on."""

    def __init__(self, module: torch.nn.Module, how: str, after: int = 2) -> None:
        super().__init__(module)
        self.how, self.after = how, after

    def train_step(self, batch: Any, backward: Any, progress: float) -> dict[str, torch.Tensor]:
        values = super().train_step(batch, backward, progress)
        if self.calls > self.after and self.how == "gradient":
            self.module.hidden.weight.grad[0, 0] = float("inf")
        elif self.calls > self.after:
            values["loss"] = values["loss"] * float(self.how)
        return values


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nan", "the loss is nan"),
        ("inf", "the loss is inf"),
        ("gradient", r"a gradient is not finite \(first at hidden.weight\)"),
    ],
)
@pytest.mark.parametrize("saved", [False, True])
def test_not_finite(
    folder: Path,
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    message: str,
    saved: bool,
) -> None:
    if saved:
        monkeypatch.setenv("LTCONVERT_CHECKPOINT_STEPS", "1")
    objective = _Breaks(ToyModel(), how)
    with pytest.raises(UserError, match=f"stage logits, step 2 of 12: {message}") as error:
        run_toy(folder, tiny_tokenizer, make_settings(), objective=objective)
    text = str(error.value)
    assert "\n" not in text and "logits.lr" in text and "--precision fp32" in text
    checkpoint = folder / "stage" / "checkpoint"
    if saved:
        assert f"last good checkpoint, step 1, is kept in {checkpoint}" in text
        assert json.loads((checkpoint / "state.json").read_text())["step"] == 1
    else:
        assert "no checkpoint yet" in text and not checkpoint.exists()
    assert all(torch.isfinite(p).all() for p in objective.module.parameters())


@pytest.mark.parametrize("late", [1, 3])
@pytest.mark.parametrize("how", ["nan", "gradient"])
def test_not_finite_and_read_late(
    folder: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, how: str, late: int
) -> None:
    """As on a GPU: the step is named, its update and all later ones do not happen."""
    monkeypatch.setenv("LTCONVERT_CHECKPOINT_STEPS", "2")
    torch.manual_seed(5)
    good, _ = run_toy(folder.parent / "good", tiny_tokenizer, make_settings(), dropout=0.0)
    monkeypatch.setitem(readings.STEPS_LATE, "cpu", late)
    torch.manual_seed(5)
    late_too, _ = run_toy(folder.parent / "late", tiny_tokenizer, make_settings(), dropout=0.0)
    for a, b in zip(good.module.parameters(), late_too.module.parameters(), strict=True):
        assert torch.equal(a, b)
    lines = [(folder.parent / name / "metrics.jsonl").read_text() for name in ("good", "late")]
    assert lines[0] == lines[1]

    torch.manual_seed(5)
    objective = _Breaks(ToyModel(0.0), how, after=10)
    with pytest.raises(UserError, match=r"stage logits, step 6 of 12: .*step 4, is kept"):
        run_toy(folder, tiny_tokenizer, make_settings(), objective=objective)
    assert (folder / "metrics.jsonl").read_text().splitlines() == lines[0].splitlines()[:5]
    assert all(torch.isfinite(p).all() for p in objective.module.parameters())
    saved = load_file(folder / "stage" / "checkpoint" / "parameters.safetensors")
    assert all(torch.isfinite(p).all() for p in saved.values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(
    folder: Path, tiny_tokenizer: Any, number: signal.Signals
) -> None:
    former = signal.getsignal(number)
    undisturbed, _ = run_toy(folder.parent / "whole", tiny_tokenizer, make_settings())
    torch.manual_seed(5)
    objective = ToyObjective(
        ToyModel(), lambda call: signal.raise_signal(number) if call == 8 else None
    )
    with pytest.raises(
        Stopped, match=r"stopped after step 5 of 12 of stage logits; saved in .*same command"
    ):
        run_toy(folder, tiny_tokenizer, make_settings(), objective=objective)
    assert issubclass(Stopped, KeyboardInterrupt)
    assert signal.getsignal(number) is former
    resumed, _ = run_toy(folder, tiny_tokenizer, make_settings())
    assert resumed.calls == 2 * (12 - 5)
    for a, b in zip(undisturbed.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_signal_in_the_last_step_is_not_swallowed(folder: Path, tiny_tokenizer: Any) -> None:
    objective = ToyObjective(
        ToyModel(), lambda call: signal.raise_signal(signal.SIGINT) if call == 23 else None
    )
    with pytest.raises(Stopped, match="step 12 of 12"):
        run_toy(folder, tiny_tokenizer, make_settings(), objective=objective)


def test_out_of_time_it_finishes_the_step_and_saves(folder: Path, tiny_tokenizer: Any) -> None:
    undisturbed, _ = run_toy(folder.parent / "whole", tiny_tokenizer, make_settings())
    for done in (1, 2):
        with pytest.raises(OutOfTime, match=f"stopped after step {done} of 12 of stage logits"):
            run_toy(folder, tiny_tokenizer, make_settings(), limit_s=0)
    assert issubclass(OutOfTime, Stopped)
    resumed, _ = run_toy(folder, tiny_tokenizer, make_settings(), limit_s=3600)
    assert resumed.calls == 2 * (12 - 2)
    for a, b in zip(undisturbed.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_signal_is_no_end_of_time(folder: Path, tiny_tokenizer: Any) -> None:
    objective = ToyObjective(
        ToyModel(), lambda call: signal.raise_signal(signal.SIGINT) if call == 2 else None
    )
    with pytest.raises(Stopped, match="step 2 of 12") as stopped:
        run_toy(folder, tiny_tokenizer, make_settings(), objective=objective, limit_s=3600)
    assert not isinstance(stopped.value, OutOfTime)


@pytest.mark.parametrize("name", ["state.json", "parameters.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_checkpoint_is_one_line(
    folder: Path, tiny_tokenizer: Any, name: str, damage: str
) -> None:
    run_toy(folder, tiny_tokenizer, make_settings(steps=2))
    path = folder / "stage" / "checkpoint" / name
    path.write_bytes(path.read_bytes()[:-9]) if damage == "cut" else path.unlink()
    with pytest.raises(
        UserError, match=r"checkpoint .* is damaged \(.*; remove .*stage to start"
    ) as error:
        run_toy(folder, tiny_tokenizer, make_settings(steps=2))
    assert "\n" not in str(error.value)


def test_full_disk_leaves_the_former_checkpoint(
    folder: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LTCONVERT_CHECKPOINT_STEPS", "3")
    torch.manual_seed(5)

    def full(tensors: Any, path: Path) -> None:
        path.write_bytes(b"begun")
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill_the_disk(call: int) -> None:
        if call == 8:
            monkeypatch.setattr(resume, "save_file", full)

    objective = ToyObjective(ToyModel(), fill_the_disk)
    with pytest.raises(OSError, match="No space left"):
        run_toy(folder, tiny_tokenizer, make_settings(), objective=objective)
    assert json.loads((folder / "stage/checkpoint/state.json").read_text())["step"] == 3
    monkeypatch.undo()
    assert run_toy(folder, tiny_tokenizer, make_settings())[0].calls == 2 * (12 - 3)


def test_checkpoint_of_the_right_size_with_wrong_bytes(folder: Path, tiny_tokenizer: Any) -> None:
    run_toy(folder, tiny_tokenizer, make_settings(steps=2))
    for name in ("parameters.safetensors", "optimizer.pt"):
        path = folder / "stage" / "checkpoint" / name
        path.write_bytes(b"\xff" * path.stat().st_size)
        with pytest.raises(UserError, match="is damaged"):
            run_toy(folder, tiny_tokenizer, make_settings(steps=2))


def test_checkpoint_of_other_settings_names_the_field(folder: Path, tiny_tokenizer: Any) -> None:
    run_toy(folder, tiny_tokenizer, make_settings(steps=2))
    with pytest.raises(UserError, match=r"written with steps 2, this run has 3; set it back"):
        run_toy(folder, tiny_tokenizer, make_settings(steps=3))
    with pytest.raises(UserError, match=r"written with precision 'fp32', this run has 'bf16'"):
        run_toy(folder, tiny_tokenizer, make_settings(steps=2), precision="bf16")


def test_checkpoint_of_another_model_names_the_tensor(folder: Path, tiny_tokenizer: Any) -> None:
    run_toy(folder, tiny_tokenizer, make_settings(steps=2))
    model = ToyModel()
    model.hidden.bias = torch.nn.Parameter(torch.zeros(1, 11))
    with pytest.raises(
        UserError, match=r"hidden.bias is \(11,\) in the checkpoint, \(1, 11\) here"
    ):
        run_toy(folder, tiny_tokenizer, make_settings(steps=2), objective=ToyObjective(model))


def test_pick_precision() -> None:
    assert pick_precision("cpu", "fp32") == ("fp32", "as asked")
    assert pick_precision(torch.device("cpu"), "bf16")[0] == "bf16"
    picked, reason = pick_precision("cpu")
    assert picked in ("fp32", "bf16") and "ms in bf16" in reason
    with pytest.raises(UserError, match="expected auto, fp32 or bf16"):
        pick_precision("cpu", "fp8")


def test_data_that_breaks_off_loses_no_step(
    folder: Path, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a step and of a row; the next call ends as an undisturbed one."""
    monkeypatch.setattr("ltconvert.distill.data.pack.BLOCK_DOCUMENTS", 2)
    whole, _ = run_toy(folder.parent / "whole", tiny_tokenizer, make_settings())
    encode, blocks = Encoder.encode, iter(range(5))

    def breaks_off(self: Encoder, documents: Any) -> Any:
        if next(blocks, None) is None:
            raise UserError("a.jsonl, line 3: no chat")
        return encode(self, documents)

    torch.manual_seed(5)
    cut = ToyObjective(ToyModel(0.1))
    with monkeypatch.context() as patched:
        patched.setattr(Encoder, "encode", breaks_off)
        with pytest.raises(UserError, match=r"line 3: no chat; 5 of 12 steps of stage logits are"):
            run_toy(folder, tiny_tokenizer, make_settings(), objective=cut)
    assert cut.calls == 2 * 5 + 1  # two micro-batches a step
    parts, _ = run_toy(folder, tiny_tokenizer, make_settings())
    for name, tensor in whole.module.state_dict().items():
        assert torch.equal(tensor, parts.module.state_dict()[name]), name
    noted = [(each / "metrics.jsonl").read_text() for each in (folder, folder.parent / "whole")]
    assert noted[0] == noted[1]
