"""metrics.jsonl, the live line and plain lines."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ltconvert.distill import progress
from ltconvert.distill.progress import describe_loss, short_number, short_time
from ltconvert.distill.runlog import RunLog


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def plain_console() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=False, width=80), text


def test_metrics_are_on_disk_at_once_and_valid_json(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "new")
    log.metrics("align", 1, {"loss": torch.tensor(1.5), "lr": 1e-3, "n": 3})
    log.metrics("align", 2, {"loss": float("nan"), "kl": float("inf")})
    assert records(tmp_path / "new") == [
        {"stage": "align", "step": 1, "loss": 1.5, "lr": 1e-3, "n": 3},
        {"stage": "align", "step": 2, "loss": "nan", "kl": "inf"},
    ]


def test_rewind_drops_later_steps_of_that_stage_and_a_torn_line(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(1, 5):
        log.metrics("align", step, {"loss": step})
    log.metrics("logits", 9, {"loss": 9})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "align", "st')
    log.rewind("align", 2)
    log.metrics("align", 3, {"loss": 30})
    assert [(r["stage"], r["step"], r["loss"]) for r in records(tmp_path)] == [
        ("align", 1, 1),
        ("align", 2, 2),
        ("logits", 9, 9),
        ("align", 3, 30),
    ]


def test_a_line_torn_in_the_middle_of_nothing_but_the_newline(tmp_path: Path) -> None:
    """A whole record without its newline is dropped, or the next one would stand on its line."""
    (tmp_path / "metrics.jsonl").write_text('{"stage": "a", "step": 1}\n{"stage": "a", "step": 2}')
    log = RunLog(tmp_path)
    log.rewind("a", 5)
    log.metrics("a", 2, {})
    assert [r["step"] for r in records(tmp_path)] == [1, 2]


def test_plain_lines_come_every_few_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    console, text = plain_console()
    with RunLog(None, console).steps("logits", 20) as line:
        for step in range(1, 21):
            clock[0] += 1.0
            line.step(step, {"loss": 2.0, "kl": 1.5, "ce": 0.5, "lr": 3e-5, "grad_norm": 9.0}, 4096)
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/20", "6/20", "11/20", "16/20", "20/20"]
    assert lines[1].startswith("logits 6/20 | loss 2 (kl 1.5 ce 0.5) | lr 3.0e-05 | 4.1k tok/s |")
    assert lines[1].endswith("GiB | eta 14s")


def test_live_line_is_one_line_on_a_terminal() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=60)
    log = RunLog(None, console)
    with log.steps("align", 2) as line:
        line.step(1, {"loss": 0.5}, 10)
        log.say("in between")
        line.step(2, {"loss": 0.25}, 10)
    shown = text.getvalue()
    assert "align 1/2 | loss 0.5" in shown and "in between" in shown
    assert "\x1b[2K" in shown  # drawn over
    last = shown.split("\x1b[2K")[-1]
    assert "align 2/2 | loss 0.25" in last and "1/2" not in last


def test_a_short_bar_shows_nothing_and_a_long_one_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    console, text = plain_console()
    log = RunLog(None, console)
    with log.bar("scoring layers", 4, "layers") as bar:
        for _ in range(4):
            clock[0] += 0.4
            bar.advance()
    assert text.getvalue() == ""
    with log.bar("scoring layers", 4, "layers") as bar:
        for _ in range(4):
            clock[0] += 1.5
            bar.advance()
    lines = text.getvalue().splitlines()
    assert lines[0] == "scoring layers [############------------] 2/4 layers | eta 3s"
    assert lines[-1] == "scoring layers [########################] 4/4 layers"
    with log.bar("scoring layers", 8, "layers", done=3) as bar:  # by a process that was killed
        for _ in range(2):
            clock[0] += 1.5
            bar.advance()
    assert "5/8 layers | eta 4s" in text.getvalue()  # three more at 1.5 s


def test_json_leaves_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    RunLog(None, json=True).say("to the person [not markup]")
    out, err = capsys.readouterr()
    assert out == "" and err == "to the person [not markup]\n"


def test_only_the_first_process_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    console, text = plain_console()
    log = RunLog(tmp_path, console)
    log.say("hidden")
    log.metrics("align", 1, {"loss": 1.0})
    log.rewind("align", 0)
    with log.steps("align", 2) as line, log.bar("x", 1) as bar:
        line.step(1, {"loss": 1.0}, 1)
        bar.advance()
    assert text.getvalue() == "" and not any(tmp_path.iterdir())


def test_short_forms() -> None:
    assert [short_number(n) for n in (7, 41_234, 2_500_000, 3e9)] == ["7", "41.2k", "2.5M", "3.0G"]
    assert [short_time(s) for s in (4, 400, 3700, 90_000)] == ["4s", "6m40s", "1h01m", "1d1h"]
    assert describe_loss({"loss": 1.93421}) == "loss 1.934"


def test_what_kernels_report_is_said_while_listened_to() -> None:
    console, text = plain_console()
    log, logger = RunLog(None, console), logging.getLogger("ltconvert.kernels.linear_kl.chunks")
    assert not logger.isEnabledFor(logging.INFO)  # asked before: the answer is cached
    with log.hearing("ltconvert.kernels"):
        logger.info("%d tokens a chunk", 2048)
        logger.debug("too small to say")
    logger.info("after")
    assert text.getvalue() == "2048 tokens a chunk\n"
