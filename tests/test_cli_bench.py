"""`bench decode` on a CPU: rows, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dreamer_case import released
from helpers import tiny_model, tiny_spec

from ltconvert.cli import app
from ltconvert.cli_bench import sizes
from ltconvert.cli_session import run
from ltconvert.convert.checkpoint import save_student
from ltconvert.convert.inspect import model_facts
from ltconvert.convert.students.lt2 import LT2Config
from ltconvert.convert.teachers.shapes import SHAPES, shape_spec
from ltconvert.distill.evaluation import decode_bench, decode_work
from ltconvert.errors import UserError, out_of_memory

CPU = ["--device", "cpu", "--precision", "fp32", "--steps", "2"]


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(decode_work.COPY_BYTES, "cpu", 2**20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A teacher and a hybrid student on disk."""
    spec = tiny_spec("ouro", num_loops=2)
    found = {}
    for name, mixers in (("teacher", None), ("hybrid", ["gdn", "full", "window"])):
        folder = tmp_path_factory.mktemp(name) / name
        save_student(tiny_model(spec, mixers, window_tokens=5), None, folder, {})
        found[name] = str(folder)
    return found


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(app, ["bench", "decode", *words, *CPU, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_rows_of_a_student_and_its_teacher(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--save", str(tmp_path / "x.json"), "--plot", str(tmp_path / "x.png")]
    found = document(
        capsys, folders["hybrid"], "--contexts", "16,1k", "--batch", "1,3", "--plain", *files
    )
    assert found["models"]["student"]["mixers"] == ["gdn", "full", "window"]
    assert found["models"]["teacher"]["mixers"] == ["full"] * 3
    assert json.loads((tmp_path / "x.json").read_text()) == found
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    keys = [(row["model"], row["batch"], row["context"], row["path"]) for row in found["rows"]]
    assert keys == [
        (model, batch, context, path)
        for model in ("teacher", "student")
        for batch in (1, 3)
        for context in (16, 1024)
        for path in ("fast", "plain")
    ]
    for row in found["rows"]:
        share = row["tokens_per_second"] / row["roofline_tokens_per_second"]
        assert row["roofline_share"] == pytest.approx(share)
        speed = row["batch"] / row["ms_per_step"] * 1000
        assert row["tokens_per_second"] == pytest.approx(speed)
        assert row["peak_bytes"] is None
    spec = tiny_spec("ouro", num_loops=2)
    facts = model_facts(LT2Config.from_spec(spec), torch.float32)
    assert found["rows"][2]["cache_bytes"] == facts.cache_bytes(1024)
    layers = 2 * sum(layer.parameters for layer in facts.layers)
    weights = 4 * (layers + facts.head_parameters + spec.hidden_size)
    assert found["rows"][6]["step_bytes"] == weights + 3 * facts.cache_bytes(1024)


def test_the_student_of_a_teacher_follows_recipe_mixers_and_full_layers(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    small = [folders["teacher"], "--contexts", "4", "--batch", "1"]
    for words, expected in (
        ([], ["full", "gdn_window", "gdn_window"]),
        (["--recipe", "window"], ["full", "window", "window"]),
        (["--mixers", "window", "--full", "0"], ["window"] * 3),
        (["--recipe", "linear-gdn", "--full", "[1]"], ["gdn", "full", "gdn"]),
        (["--mixers", "gdn, window,full"], ["gdn", "window", "full"]),
    ):
        assert document(capsys, *small, *words)["models"]["student"]["mixers"] == expected


def test_a_shorter_student_and_a_dreamer_are_what_is_measured(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--contexts", "4", "--batch", "1"]
    drop = ["--recipe", "layer-drop"]  # a quarter of three layers is one
    found = document(capsys, folders["teacher"], *drop, *small)["models"]
    assert [len(found[who]["mixers"]) for who in ("teacher", "student")] == [3, 2]
    dreamer = released(slices=4, top_experts=5)
    save_student(dreamer, None, tmp_path / "dreamer", {})
    rows = document(capsys, str(tmp_path / "dreamer"), *small, "--plain")["rows"]
    assert [(row["model"], row["path"]) for row in rows] == [
        (model, path) for model in ("teacher", "student") for path in ("fast", "plain")
    ]
    facts = model_facts(dreamer.config, torch.float32)
    assert rows[2]["cache_bytes"] == facts.cache_bytes(4)
    # At each of 3 depths: 2 of 3 entries, 5 of 12 experts, and what all tokens use.
    layer = dreamer.model.dreamer
    entries = sum(p[:2].numel() for p in layer.attention.parameters())
    experts = sum(p[:5].numel() for p in layer.experts.parameters())
    always = sum(p.numel() for x in (layer.depth, layer.shared) for p in x.parameters())
    always += layer.attention_router.keys.numel() + layer.expert_router.keys.numel()
    around = dreamer.head_weight.numel() + dreamer.model.norm.weight.numel()
    read = 4 * (3 * (entries + experts + always) + around)
    assert rows[2]["step_bytes"] == read + facts.cache_bytes(4)
    found = document(capsys, folders["teacher"], "--recipe", "dreamer", *small)["rows"]
    assert [row["path"] for row in found] == ["fast"] * 2 and "error" not in found[1]


def test_a_students_teacher_is_the_one_that_it_was_made_from(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a student with fewer layers, all of them full; where it is not there one line says so."""
    spec = tiny_spec("ouro", num_layers=2, layer_rope=("default",) * 2, layer_windows=(None,) * 2)
    for place, layers in ((folders["teacher"], 3), (str(tmp_path / "gone"), 2)):
        provenance = {"teacher": {"name": "teacher", "source": place, "revision": None}}
        save_student(tiny_model(spec), None, tmp_path / "student", provenance)
        call = [str(tmp_path / "student"), "--contexts", "4", "--batch", "1"]
        assert run(app, ["bench", "decode", *call, *CPU, "--json"]) == 0
        shown = capsys.readouterr()
        found = json.loads(shown.out)["models"]
        assert [len(found[who]["mixers"]) for who in ("teacher", "student")] == [layers, 2]
        assert ("cannot be read (no teacher" in shown.err) == (layers == 2)
    asked = document(capsys, *call, "--full", "1", "--recipe", "window")["models"]
    assert sorted(asked["student"]["mixers"]) == ["full", "window"]


def test_a_row_without_memory_says_so(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")

    monkeypatch.setattr(decode_bench, "plain_seconds", refuse)
    call = [folders["teacher"], "--contexts", "4", "--batch", "1", "--plain"]
    rows = document(capsys, *call)["rows"]
    assert [row.get("error") for row in rows] == [None, "out of memory"] * 2
    assert run(app, ["bench", "decode", *call, *CPU]) == 0
    assert "out of memory" in capsys.readouterr().out


def test_contexts_beyond_all_memory_are_rows_among_the_others(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """10^9 tokens are terabytes of the smallest teacher's keys, and nothing to windows alone."""
    words = ["--contexts", "1000000k,8", "--batch", "1,8", "--plain", "--recipe", "window"]
    plot = ["--plot", str(tmp_path / "x.png")]
    rows = document(capsys, folders["teacher"], *words, "--full", "0.34", *plot)["rows"]
    assert [(row["batch"], row.get("error")) for row in rows] == 2 * [
        (batch, error) for batch in (1, 8) for error in 2 * ["out of memory"] + 2 * [None]
    ]
    assert (tmp_path / "x.png").exists()
    rows = document(capsys, folders["teacher"], *words, "--full", "0")["rows"]
    assert [row["model"] for row in rows if "error" in row] == 4 * ["teacher"]


def test_a_model_without_memory_is_rows_too(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = decode_bench.random_model

    def refuse(config: LT2Config, device: torch.device, dtype: torch.dtype) -> Any:
        if set(config.mixers) == {"full"} and device.type != "meta":
            raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1")
        return real(config, device, dtype)

    call = [folders["hybrid"], "--contexts", "4", "--batch", "1,2"]
    whole = document(capsys, *call)["rows"]
    monkeypatch.setattr(decode_bench, "random_model", refuse)
    rows = document(capsys, *call)["rows"]
    assert [row.get("error") for row in rows] == 2 * ["out of memory"] + 2 * [None]
    for row, before in zip(rows, whole, strict=True):
        assert row["step_bytes"] == before["step_bytes"]
    monkeypatch.setattr(decode_bench, "free_memory", lambda: 1000)
    rows = document(capsys, *call)["rows"]
    assert [row.get("error") for row in rows] == 4 * ["out of memory"]


def test_a_fault_that_is_not_about_memory_is_none_of_its_rows(
    folders: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(decode_bench, "plain_seconds", fail)
    call = [folders["teacher"], "--contexts", "4", "--batch", "1", "--plain"]
    assert run(app, ["bench", "decode", *call, *CPU]) == 1
    assert "illegal memory access" in capsys.readouterr().err


def test_the_failed_capture_of_a_graph_is_about_memory_when_its_cause_is() -> None:
    """What `torch.cuda.graph` raises on its way out hides what was raised inside."""
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB")
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
    except RuntimeError as error:
        assert out_of_memory(error)
    assert out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ..."))
    assert not out_of_memory(RuntimeError("CUDA error: operation failed due to a previous error"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a model, or --shape"),
        (["x", "--shape", "ouro-1.4b"], "and not both"),
        (["--shape", "ouro-1.4"], "did you mean ouro-1.4b?"),
        (["--shape", "ouro-1.4b", "--mixers", "gdm"], "unknown mixer 'gdm'"),
        (["--shape", "ouro-1.4b", "--mixers", "gdn,full"], "2 mixers for 24 layers"),
        (["--shape", "ouro-1.4b", "--contexts", "4k,x"], "such as 4k,32k"),
        (["--shape", "ouro-1.4b", "--full", "99"], "99"),
        (["--shape", "ouro-1.4b", "--save", "/"], "/ is a folder; name a file in it"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["bench", "decode", *words, *CPU]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("words", [["--recipe", "dreamer"], ["--mixers", "gdn"], ["--full", "0"]])
def test_a_student_is_measured_as_it_is(
    words: list[str], folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["bench", "decode", folders["hybrid"], *words, *CPU]) == 2
    assert "leave out --recipe, --mixers and --full" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bench", "--help"], ["bench", "decode", "--help"]):
        assert run(app, words) == 0
        assert "Usage" in capsys.readouterr().out


def test_sizes() -> None:
    assert sizes("4k, 8K,1000") == [4096, 8192, 1000]
    for wrong in ("", "0", "4k,,8k", "-1", "4m"):
        with pytest.raises(UserError, match="expected numbers"):
            sizes(wrong)


PARAMETERS = {  # published, in units of a million
    "smollm2-135m": 134.5,
    "smollm2-360m": 361.8,
    "smollm2-1.7b": 1711.4,
    "qwen3-0.6b": 596.0,
    "qwen3-1.7b": 1720.6,
    "ouro-1.4b": 1434.0,
    "ouro-2.6b": 2667.0,
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_have_the_published_sizes(name: str) -> None:
    count = model_facts(LT2Config.from_spec(shape_spec(name))).parameters
    assert count / 1e6 == pytest.approx(PARAMETERS[name], rel=2e-3)
