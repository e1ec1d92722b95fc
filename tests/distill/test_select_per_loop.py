"""The study of single visits against whole forwards, its cost, its table and the verb."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pipeline_case import make_case, make_recipe
from rich.console import Console
from selection_case import Visits, kl, packed, pair, probe
from torch import nn

from ltconvert import recipes
from ltconvert.cli import app
from ltconvert.cli_session import run
from ltconvert.convert.transfer import build_student
from ltconvert.distill.progress import Bar
from ltconvert.distill.selection.per_loop import rank_visits
from ltconvert.distill.selection.render import render_per_loop
from ltconvert.kernels import dispatch


class OneVisit(nn.Module):
    """Another mixer at one of the calls that a forward pass makes."""

    def __init__(self, usual: nn.Module, other: nn.Module, loop: int, loops: int) -> None:
        super().__init__()
        self.usual, self.other, self.loop, self.loops, self.calls = usual, other, loop, loops, 0

    def forward(self, *args: Any) -> Any:
        now = self.calls % self.loops
        self.calls += 1
        return (self.other if now == self.loop else self.usual)(*args)


@pytest.mark.parametrize(("family", "loops"), [("llama", 2), ("ouro", 3), ("gemma3", 2)])
def test_a_visits_gain_is_that_of_whole_forwards(family: str, loops: int) -> None:
    teacher, student = pair(family, num_loops=loops)
    batches = [packed(), packed(seed=2, padding=4)]
    scores = rank_visits(probe(teacher, student, batches))
    none = kl(teacher, student, batches)
    assert scores.student_kl == pytest.approx(none, rel=1e-4)
    assert [(v["layer"], v["loop"]) for v in scores.visits] == [
        (layer, loop) for loop in range(loops) for layer in range(3)
    ]
    for index, layer in enumerate(student.model.layers):
        usual = layer.mixer
        for loop in range(loops):
            layer.mixer = OneVisit(usual, teacher.model.layers[index].mixer, loop, loops)
            gain = none - kl(teacher, student, batches)
            assert scores.gain(index, loop) == pytest.approx(gain, rel=1e-4, abs=1e-6)
        layer.mixer = usual
    best = sorted(range(3 * loops), key=lambda slot: -scores.visits[slot]["gain"])
    assert scores.ranking == best
    assert scores.best == best[:loops]  # one layer's worth of visits


def test_prelude_and_coda_have_one_visit_each() -> None:
    spec = {"num_loops": 2, "num_layers": 4, "layer_rope": ("default",) * 4}
    teacher, _ = pair(layer_windows=(None,) * 4, **spec)
    options = {"prelude_layers": 1, "coda_layers": 1}
    student = build_student(teacher, ["gdn"] * 4, options).eval()
    scores = rank_visits(probe(teacher, student, [packed()]))
    assert len(scores.visits) == 6
    assert scores.gain(0, 1) is None
    restored = build_student(teacher, ["gdn", "gdn", "gdn", "full"], options).eval()
    gain = kl(teacher, student, [packed()]) - kl(teacher, restored, [packed()])
    assert scores.gain(3, 1) == pytest.approx(gain, rel=1e-4, abs=1e-6)


def test_the_cost_told_is_the_work_done() -> None:
    """Half a forward pass a visit, and one of each model."""
    teacher, student = pair("ouro", num_loops=3)
    rows = [packed(rows=1, seed=seed) for seed in range(4)]
    visits = Visits(teacher, student)
    told = rank_visits(probe(teacher, student, rows)).cost
    assert told.tokens == 4 * 17
    assert visits.count / 9 == pytest.approx(told.forwards) == pytest.approx(4 * ((9 + 1) / 2 + 2))
    assert told.forward_tokens == pytest.approx(17 * told.forwards)


def test_a_killed_study_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    teacher, student = pair("ouro", num_loops=2)
    rows = [packed(rows=1, seed=seed) for seed in range(4)]
    whole = rank_visits(probe(teacher, student, rows))
    cut = probe(teacher, student, rows, path=tmp_path / "partial.json")
    save = cut.progress.save

    def killed(state: dict[str, Any]) -> None:
        save(state)
        if len(state["history"]) == 2:
            raise KeyboardInterrupt

    cut.progress.save = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        rank_visits(cut)
    again = probe(teacher, student, rows, path=tmp_path / "partial.json")
    assert len(again.progress.state["history"]) == 2
    found = rank_visits(again)
    assert found.visits == whole.visits
    assert found.cost.forwards == whole.cost.forwards


def test_it_stops_once_the_best_visits_have_settled() -> None:
    teacher, student = pair("ouro", num_loops=2)
    student.model.layers[1].mixer = teacher.model.layers[1].mixer
    rows = [packed(rows=1, seed=1)] * 6
    scores = rank_visits(probe(teacher, student, rows, stable_rounds=2))
    assert (scores.batches, scores.stopped_early) == (3, True)
    assert scores.gain(1, 0) == scores.gain(1, 1) == 0.0  # the same mixer twice


def test_the_bar_ends_full(monkeypatch: pytest.MonkeyPatch) -> None:
    made = probe(*pair("ouro", num_loops=2), [packed(rows=1, seed=seed) for seed in range(2)])
    bars, bar = [], made.inputs.log.bar

    @contextmanager
    def noting(label: str, total: int, unit: str) -> Iterator[Bar]:
        with bar(label, total, unit) as shown:
            yield shown
        bars.append((shown.done, total))

    monkeypatch.setattr(made.inputs.log, "bar", noting)
    rank_visits(made)
    assert [done / total for done, total in bars] == [1.0]


@pytest.fixture
def looped(tmp_path: Path, tiny_tokenizer: Any) -> list[str]:
    make_case(tmp_path, tiny_tokenizer, "ouro")
    recipe = make_recipe(tmp_path)
    (tmp_path / "toy.yaml").write_text(recipes.dump(recipe))
    words = ["--teacher", str(tmp_path / "teacher"), "--recipe", str(tmp_path / "toy.yaml")]
    yield [*words, "--out", str(tmp_path / "run"), "--device", "cpu", "--precision", "fp32"]
    dispatch.set_default("auto")


def test_the_verb_shows_layers_by_loops_and_leaves_the_run_as_it_is(
    looped: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["select-layers", *looped, "--per-loop"]) == 0
    shown = capsys.readouterr().out
    assert "loop 1" in shown and "loop 2" in shown and "loop 3" not in shown
    document = json.loads((tmp_path / "run" / "per_loop" / "per_loop.json").read_text())
    assert len(document["visits"]) == 6
    assert not (tmp_path / "run" / "stages" / "select").exists()
    assert run(app, ["select-layers", *looped]) == 0  # goes on from the same aligned student
    student = (tmp_path / "run" / "student" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert run(app, ["select-layers", *looped, "--per-loop", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["visits"] == document["visits"]
    assert (tmp_path / "run" / "student" / "model.safetensors").read_bytes() == student
    assert "full_layers: 1" in (tmp_path / "run" / "recipe.resolved.yaml").read_text()


def test_one_loop_is_refused(looped: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    call = ["select-layers", *looped, "--per-loop", "--set", "student.loops=1"]
    assert run(app, call) == 2
    assert "--per-loop compares loops" in capsys.readouterr().err


def test_the_table_marks_the_best_visits() -> None:
    teacher, student = pair("ouro", num_loops=2)
    scores = rank_visits(probe(teacher, student, [packed()]))
    console = Console(file=io.StringIO(), width=140)
    console.print(render_per_loop(scores))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(" *") == 2
    assert "the best 2 of 6 visits" in text
    assert f"{scores.gain(2, 1):.4f}" in text
