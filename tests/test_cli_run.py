"""The verbs that work on models, end to end, on a tiny random teacher in transformers' format."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lock_case import holder
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ltconvert import recipes
from ltconvert.cli import app
from ltconvert.cli_eval import Models, default_out, find, recipe_of
from ltconvert.cli_session import run
from ltconvert.distill.run_lock import LOCK_FILE
from ltconvert.kernels import dispatch

WORDS = "the a cat dog house river sees runs takes under over green old seven and then so"
TRAIN = {"budget_tokens": 256, "seq_len_tokens": 32, "batch_tokens": 64, "lr": 1e-3}


@pytest.fixture(autouse=True)
def _default_kernels() -> Any:
    yield
    dispatch.set_default("auto")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A folder with `teacher/`, `text.jsonl` and `tiny.yaml`."""
    folder = tmp_path_factory.mktemp("case")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "teacher")
    tiny_tokenizer.save_pretrained(folder / "teacher")
    draw = random.Random(0)
    texts = (" ".join(draw.choices(WORDS.split(), k=draw.randint(5, 40))) for _ in range(80))
    lines = (json.dumps({"text": text}) for text in texts)
    (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    recipe = {
        "student": {"full_layers": 1},
        "data": {"source": str(folder / "text.jsonl"), "heldout_share": 0.2},
        "align": TRAIN,
        "select": {"eval_tokens": 64, "seq_len_tokens": 32},
        "logits": TRAIN | {"mixer_lr": 1e-3},
        "longctx": TRAIN | {"mixer_lr": 1e-3, "seq_len_tokens": 64},
        "eval": {
            "heldout_tokens": 256,
            "heldout_seq_len_tokens": 64,
            "recall_lengths_tokens": [256],
            "recall_examples": 2,
            "generation_prompts": 1,
            "generation_tokens": 4,
            "decode_contexts_tokens": [16],
            "tasks": [],
        },
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder


def words(case: Path, verb: str, *more: str) -> list[str]:
    """A call of `verb` on the case, CPU, fp32."""
    teacher, recipe = str(case / "teacher"), str(case / "tiny.yaml")
    start = [verb, "--teacher", teacher, "--recipe", recipe, "--device", "cpu"]
    return [*start, "--precision", "fp32", *more]


@pytest.fixture(scope="module")
def finished(case: Path) -> Path:
    """The run folder of a `distill` that has ended well."""
    out = case / "run"
    assert run(app, words(case, "distill", "--out", str(out))) == 0
    return out


def test_distill_leaves_a_whole_run_folder(finished: Path) -> None:
    for name in ("recipe.resolved.yaml", "metrics.jsonl", "student/provenance.json"):
        assert (finished / name).is_file(), name
    for stage in ("align", "select", "logits", "longctx"):
        assert (
            json.loads((finished / "stages" / stage / "stage.json").read_text())["stage"] == stage
        )
    for name in ("report.md", "report.html"):
        assert (finished / name).stat().st_size > 100, name


def test_repeated_distill_skips_all_stages(
    case: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "student" / "model.safetensors").read_bytes()
    assert run(app, words(case, "distill", "--out", str(finished), "--json")) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)  # stdout holds the document alone
    assert [row["stage"] for row in document["stages"]][-1] == "longctx"
    assert len(document["full_layers"]) == 1
    assert "skipped" in captured.err
    assert (finished / "student" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file or folder"),
        ("", "no document"),
        ('{"body": "no text"}', "neither a field 'text'"),
        ('{"text": "the only one"}', "no document"),
        ('{"text": "short"}\n{"text": "too"}\n{"text": "a"}\n{"text": "b"}', "fewer than one row"),
        (
            "\n".join(['{"text": "dog"}', '{"text": "a"}', *['{"text": "house"}'] * 99, "{"]),
            "line 10",
        ),
        (
            '{"messages": [{"role": "user", "content": "dog"}]}\n' * 99
            + '{"text": "house"}\n{"messages": [{"role": "user", "content": null}]}',
            "line 101, message 1: 'content' is missing or null",
        ),
    ],
)
def test_a_run_refused_for_its_text_leaves_nothing_behind(
    case: Path, tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "text.jsonl", tmp_path / "runs" / "one"
    if text is not None:
        data.write_text(text, encoding="utf-8")
    call = words(case, "distill", "--out", str(out), "--data", str(data))
    assert run(app, [*call, "--set", "data.heldout_share=0.4"]) == 2
    assert message in capsys.readouterr().err
    assert not out.parent.exists()


def test_another_recipe_in_the_same_folder_is_refused(
    case: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = words(case, "distill", "--out", str(finished), "--set", "align.lr=0.5")
    assert run(app, call) == 2
    line = capsys.readouterr().err
    assert "align.lr" in line
    assert "0.5" in line


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time and bytes of every file, the lock aside."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize("verb", ["distill", "select-layers", "eval"])
def test_a_folder_where_another_call_is_at_work_is_refused_and_left_alone(
    verb: str, case: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = words(case, verb, "--out", str(finished), "--set", "eval.recall_examples=3")
    if verb == "eval":
        call = ["eval", "--student", str(finished), "--device", "cpu"]
    before = content(finished)
    with holder(finished) as process:
        assert run(app, call) == 2
        captured = capsys.readouterr()
        assert f"process {process.pid} " in captured.err and str(finished) in captured.err
        assert captured.out == ""  # before anything was loaded
        assert run(app, ["inspect", str(finished)]) == 0  # reading goes on
    assert content(finished) == before


def test_a_first_call_that_has_just_begun_is_no_folder_of_something_else(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with holder(tmp_path / "run"):
        assert run(app, words(case, "distill", "--out", str(tmp_path / "run"))) == 2
        assert "at work in it" in capsys.readouterr().err


def test_a_folder_with_other_files_is_refused(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert run(app, words(case, "distill", "--out", str(tmp_path))) == 2
    assert "no run of ltconvert" in capsys.readouterr().err
    assert run(app, words(case, "distill", "--out", str(tmp_path / "thesis.tex"))) == 2
    assert "is a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_misspelt_task_is_refused_before_any_training(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    tasks = ("--set", "eval.tasks=[ltconvert_nedle]")
    assert run(app, words(case, "distill", "--out", str(out), *tasks)) == 2
    assert "ltconvert_needle" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("verb", "settings", "expected"),
    [
        ("distill", ["eval.recall_lengths_tokens=[8]"], "recall at 8 tokens is too short"),
        ("select-layers", ["select.enabled=false"], "set select.enabled=true"),
        (
            "select-layers",
            ["student.mixer=full", "student.full_layers=1.0"],
            "the recipe tiny converts no layer",
        ),
        ("plan", ["student.loops=2"], "student.loops is 2, the teacher runs 1"),
    ],
)
def test_mistakes_are_told_before_any_training(
    verb: str,
    settings: list[str],
    expected: str,
    case: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    assert run(app, words(case, verb, "--out", str(tmp_path / "run"), *options)) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run" / "stages").exists()


def test_a_damaged_recipe_of_a_run_is_one_line(
    case: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.json").write_bytes((finished / "run.json").read_bytes())
    for text in ("a: b: c", "seed"):
        (run_dir / "recipe.resolved.yaml").write_text(text)
        assert run(app, words(case, "distill", "--out", str(run_dir))) == 2
        assert "recipe.resolved.yaml is damaged" in capsys.readouterr().err


def test_select_layers_then_distill_in_one_folder(
    case: Path, tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    assert run(app, words(case, "select-layers", "--out", out)) == 0
    shown = capsys.readouterr().out
    assert "selection.json" in shown
    assert "--set student.full_layers=" in shown
    assert run(app, words(case, "select-layers", "--out", out, "--json")) == 0
    selection = json.loads(capsys.readouterr().out)
    assert sorted(selection["ranking"]) == [0, 1, 2]
    assert run(app, words(case, "distill", "--out", out)) == 0
    same = "student/model.safetensors"
    assert (Path(out) / same).read_bytes() == (finished / same).read_bytes()


def test_plan(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, words(case, "plan")) == 0
    assert "longctx" in capsys.readouterr().out
    assert run(app, words(case, "plan", "--json")) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["stage"] for row in rows] == ["align", "select", "logits", "longctx"]
    assert not (case / "runs").exists()


def test_plan_refuses_what_cannot_fit(case: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["logits.seq_len_tokens=100000000", "logits.batch_tokens=100000000"]
    call = words(case, "plan", *(word for text in huge for word in ("--set", text)))
    assert run(app, call) == 2
    line = capsys.readouterr().err
    assert "logits" in line
    assert "GiB" in line


def test_eval(
    case: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both models, the teacher found by the student's provenance; then each alone."""
    shared = ["--device", "cpu", "--precision", "fp32"]
    out = ["--out", str(tmp_path / "both")]
    call = ["eval", "--student", str(finished), *shared, *out]
    assert run(app, [*call, "--tasks", "ltconvert_offline", "--limit", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["models"]) == {"teacher", "student"}
    recorded = json.loads((finished / "evaluation.json").read_text())["parts"]
    assert document["parts"]["heldout"] == recorded["heldout"]
    assert document["parts"]["tasks"]["rows"]
    assert (tmp_path / "both" / "report.html").is_file()
    recipe_data = ["--data", str(case / "text.jsonl"), "--set", "eval.recall_lengths_tokens=256"]
    small = [*recipe_data, "--set", "eval.heldout_tokens=64", "--set", "eval.tasks=[]"]
    small += ["--set", "eval.heldout_seq_len_tokens=32", "--set", "eval.recall_examples=1"]
    small += ["--set", "eval.decode_contexts_tokens=8"]
    teacher = ["eval", "--teacher", str(case / "teacher"), *shared, *small]
    assert run(app, [*teacher, "--out", str(tmp_path / "teacher")]) == 0
    assert "report" in capsys.readouterr().out


def test_eval_names_what_is_missing(
    case: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["eval", "--student", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert run(app, ["eval", "--student", str(case / "teacher")]) == 2
    assert "no student of ltconvert but a model of type 'llama'" in capsys.readouterr().err


def test_a_students_folder_stands_for_its_run(finished: Path, tmp_path: Path) -> None:
    for name in (finished, finished / "student"):
        models = find(None, str(name))
        assert (models.student, models.run_dir) == (finished / "student", finished)
    assert find(None, str(finished / "stages/align/student")).run_dir is None
    outside = shutil.copytree(finished / "student", tmp_path / "copy" / "student")
    models = find(None, str(outside))
    assert models.run_dir is None and default_out(models) == Path("runs/eval-copy")


def _other_teacher(case: Path, folder: Path) -> Path:
    shutil.copytree(case / "teacher", folder)
    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_eval_keeps_the_figures_of_another_student_of_that_name(
    case: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a folder that nobody named; nor do those beside another teacher take their place."""
    monkeypatch.chdir(tmp_path)
    small = ["--set", "eval.heldout_tokens=64", "--set", "eval.tasks=[]", "--device", "cpu"]
    small += ["--set", "eval.recall_examples=1", "--precision", "fp32"]
    for place in "ab":
        shutil.copytree(finished / "student", tmp_path / place / "mine")
    assert run(app, ["eval", "--student", "a/mine", *small]) == 0
    before = (tmp_path / "runs/eval-mine/evaluation.json").read_bytes()
    assert run(app, ["eval", "--student", "a/mine", *small]) == 0
    assert run(app, ["eval", "--student", "b/mine", *small]) == 2
    assert "holds the evaluation of another student" in capsys.readouterr().err
    other = _other_teacher(case, tmp_path / "other")
    assert run(app, ["eval", "--student", "a/mine", "--teacher", str(other), *small]) == 2
    assert "holds the evaluation of another teacher" in capsys.readouterr().err
    assert (tmp_path / "runs/eval-mine/evaluation.json").read_bytes() == before


def test_eval_of_a_run_without_its_teacher(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the run's precision; the teacher that the student records has moved."""
    moved = shutil.copytree(finished, tmp_path / "moved")
    path = moved / "student" / "provenance.json"
    provenance = json.loads(path.read_text())
    provenance["teacher"]["source"] = str(tmp_path / "gone")
    path.write_text(json.dumps(provenance))
    assert run(app, ["eval", "--student", str(moved), "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert "precision: fp32 (as the run began)" in shown.out
    assert "records cannot be loaded" in shown.err and "name it with --teacher" in shown.err


@pytest.mark.parametrize("budget", [None, "demo", "small"])
def test_eval_takes_any_budget_whatever_rows_the_run_chose(budget: str | None) -> None:
    own = recipes.resolve("hybrid25", overrides=["align.micro_batch_rows=16"])
    models = Models(None, Path("student"), None, {"recipe": own.model_dump(mode="json")})
    found = recipe_of(models, budget, {}, ["eval.recall_examples=5"])
    assert found.eval.recall_examples == 5
    assert (
        found.eval.heldout_tokens == recipes.resolve("hybrid25", budget=budget).eval.heldout_tokens
    )


def test_eval_beside_another_teacher_leaves_the_runs_own_report(
    case: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _other_teacher(case, tmp_path / "other")
    before = (finished / "evaluation.json").read_bytes()
    call = ["eval", "--student", str(finished), "--teacher", str(other), "--device", "cpu"]
    assert run(app, call) == 2
    assert "give another folder with --out" in capsys.readouterr().err
    assert (finished / "evaluation.json").read_bytes() == before


def test_inspect(case: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = LlamaForCausalLM.from_pretrained(case / "teacher")
    assert run(app, ["inspect", str(case / "teacher"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == sum(p.numel() for p in teacher.parameters())
    assert (
        facts["cache_bytes_per_token"] == 3 * 2 * 2 * 8 * 2
    )  # layers, k and v, heads, width, bf16
    for reference in (finished, finished / "student"):
        assert run(app, ["inspect", str(reference), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert sorted(layer["mixer"] for layer in facts["layers"]) == ["full", "gdn", "gdn"]
        assert facts["cache_bytes_per_token"] == 2 * 2 * 8 * 2
    assert run(app, ["inspect", str(finished)]) == 0
    assert "gdn" in capsys.readouterr().out


def test_generate(
    case: Path, finished: Path, capsys: pytest.CaptureFixture[str], tiny_tokenizer: Any
) -> None:
    call = ["--prompt", "the cat", "--max-new-tokens", "6", "--precision", "fp32"]
    teacher = LlamaForCausalLM.from_pretrained(case / "teacher").eval()
    ids = tiny_tokenizer("the cat", return_tensors="pt")
    new = teacher.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids.input_ids.shape[1] :]
    expected = tiny_tokenizer.decode(new, skip_special_tokens=True)
    assert run(app, ["generate", str(case / "teacher"), *call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == expected
    assert run(app, ["generate", str(case / "teacher"), *call]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip() == expected.strip() and not captured.err
    assert run(app, ["generate", str(case / "teacher"), *call, "--max-new-tokens", "255"]) == 0
    longest = f"up to {ids.input_ids.shape[1] + 255} tokens, and the model is made for 256\n"
    assert capsys.readouterr().err == longest
    sampling = ["--temperature", "0.9", "--top-p", "0.9", "--top-k", "20", "--seed", "3"]
    texts = []
    for more in (sampling, sampling, [*sampling[:-1], "4"], ["--chat"], ["--beams", "2"]):
        assert run(app, ["generate", str(finished), *call, *more, "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_generate_from_an_unfinished_run(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.resolved.yaml").write_text("name: x\n")
    assert run(app, ["generate", str(tmp_path), "-p", "x"]) == 2
    assert "without a finished student" in capsys.readouterr().err


@pytest.mark.slow
def test_student_loads_in_a_fresh_process(finished: Path) -> None:
    """The shim that `save_student` writes is all that transformers needs."""
    folder = finished / "student"
    here = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    logits = here(torch.arange(1, 20)[None]).logits
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
        "torch.save(m(torch.arange(1, 20)[None]).logits.detach(), sys.argv[1])"
    )
    saved = finished / "logits.pt"
    subprocess.run([sys.executable, "-c", code, saved], check=True, capture_output=True)
    assert torch.equal(torch.load(saved), logits)


def test_ctrl_c_keeps_the_work(case: Path, finished: Path, tmp_path: Path) -> None:
    """SIGINT in the middle of a stage: exit status 130, one line, and the same call goes on."""
    out = tmp_path / "run"
    command = [
        Path(sys.executable).with_name("ltconvert"),
        *words(case, "distill", "--out", str(out)),
    ]
    slow = [*command, "--set", "align.budget_tokens=200000"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        slow, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    metrics = out / "metrics.jsonl"
    for _ in range(1200):
        if metrics.exists() and metrics.read_text().count("\n") > 2:
            break
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert errors.strip().count("\n") == 0, errors
    assert errors.startswith("error: ")
    assert list((out / "stages" / "align").glob("**/checkpoint"))
