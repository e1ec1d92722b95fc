"""A whole evaluation: what is written, what is kept, what is measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec
from lock_case import changed
from pipeline_case import make_case

from ltconvert.convert.teachers.load import Teacher, load_teacher
from ltconvert.distill.evaluate import evaluate, read_evaluation
from ltconvert.distill.evaluation import parts as evaluation
from ltconvert.distill.evaluation.parts import PARTS
from ltconvert.distill.runlog import RunLog
from ltconvert.errors import UserError
from ltconvert.recipes.data import DataSettings
from ltconvert.recipes.evaluation import EvalSettings

SETTINGS = EvalSettings(
    heldout_tokens=256,
    heldout_seq_len_tokens=64,
    recall_lengths_tokens=[260],
    recall_examples=3,
    generation_prompts=2,
    generation_tokens=4,
    decode_contexts_tokens=[16, 32],
    tasks=["ltconvert_copying"],
    task_limit=2,
)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("case")
    make_case(folder, tiny_tokenizer)
    return folder


@pytest.fixture(scope="module")
def teacher(case: Path) -> Teacher:
    return load_teacher(str(case / "teacher"))


@pytest.fixture(scope="module")
def student() -> Any:
    return tiny_model(tiny_spec(), ["gdn", "full", "gdn"], seed=1)


def measure(
    case: Path, folder: Path, teacher: Teacher | None, student: Any, **changes: Any
) -> dict[str, Any]:
    settings = SETTINGS.model_copy(update=changes.pop("settings", {}))
    return evaluate(
        teacher,
        student,
        changes.pop("tokenizer"),
        settings,
        data=DataSettings(source=str(case / "text.jsonl"), heldout_share=0.2),
        folder=folder,
        log=RunLog(None, json=True),
        **changes,
    )


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The toy documents are shorter than real prompts."""
    monkeypatch.setattr(evaluation, "PROMPT_TOKENS", 8)


def test_all_parts_are_measured_and_kept(
    case: Path,
    teacher: Teacher,
    student: Any,
    tiny_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = measure(case, tmp_path, teacher, student, tokenizer=tiny_tokenizer)
    assert list(found["parts"]) == list(PARTS)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == found
    assert found["models"]["student"]["mixers"] == ["gdn", "full", "gdn"]
    assert found["models"]["teacher"]["name"] == teacher.name
    parts = found["parts"]
    assert parts["heldout"]["kl"] > 0
    assert parts["recall"]["student"]["needle"]["260"]["examples"] == 3
    assert parts["generation"]["prompts"] == 2
    assert [p["context"] for p in parts["decode"]["teacher"]] == [16, 32]
    assert parts["tasks"]["rows"][0]["task"] == "ltconvert_copying"

    measured: list[str] = []
    for name, part in PARTS.items():

        def note(job: Any, name: str = name) -> dict[str, Any]:
            measured.append(name)
            return {"tokens": 0}

        monkeypatch.setitem(PARTS, name, evaluation.Part(note, part.settings, part.reads_data))
    again = measure(case, tmp_path, teacher, student, tokenizer=tiny_tokenizer)
    assert measured == [] and again["parts"] == parts
    fewer = {"recall_examples": 2}
    measure(case, tmp_path, teacher, student, tokenizer=tiny_tokenizer, settings=fewer)
    assert measured == ["recall"]
    other = tiny_model(tiny_spec(), ["gdn"] * 3, seed=2)
    measure(case, tmp_path, teacher, other, tokenizer=tiny_tokenizer)
    assert measured == ["recall", *PARTS]
    with changed(case / "text.jsonl"):
        measure(case, tmp_path, teacher, other, tokenizer=tiny_tokenizer)
    reading = [name for name, part in PARTS.items() if part.reads_data]
    assert measured == ["recall", *PARTS, *reading]

    # A folder of a version that noted no content: what is measured in it from now on notes it.
    document = json.loads((tmp_path / "evaluation.json").read_text())
    for needs in document["depends_on"].values():
        needs.get("data", {}).pop("content", None)
    (tmp_path / "evaluation.json").write_text(json.dumps(document))
    measured.clear()
    measure(case, tmp_path, teacher, other, tokenizer=tiny_tokenizer)
    assert measured == []
    measure(case, tmp_path, teacher, student, tokenizer=tiny_tokenizer)
    assert measured == [*PARTS]
    with changed(case / "text.jsonl"):
        measure(case, tmp_path, teacher, student, tokenizer=tiny_tokenizer)
    assert measured == [*PARTS, *reading]


def test_the_same_weights_in_other_layers_are_measured_again(
    case: Path, teacher: Teacher, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    found = []
    for window in (4, 2, 2):
        mixers = ["window", "full", "window"]
        student = tiny_model(tiny_spec(), mixers, seed=1, window_tokens=window)
        scores = measure(
            case, tmp_path, teacher, student, tokenizer=tiny_tokenizer, parts=["heldout"]
        )
        found.append((scores["models"]["student"]["digest"], scores["parts"]["heldout"]["kl"]))
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1] == found[2][1]


def test_a_crash_keeps_the_parts_before_it(
    case: Path, teacher: Teacher, student: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    def crash(job: Any) -> None:
        raise RuntimeError("power cut")

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PARTS, "recall", evaluation.Part(crash, PARTS["recall"].settings))
        with pytest.raises(RuntimeError, match="power cut"):
            measure(case, tmp_path, teacher, student, tokenizer=tiny_tokenizer)
    left = read_evaluation(tmp_path)
    assert left is not None and list(left["parts"]) == ["heldout"]
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize("who", ["teacher", "student"])
def test_one_model_alone(
    case: Path, teacher: Teacher, student: Any, tiny_tokenizer: Any, tmp_path: Path, who: str
) -> None:
    models = (teacher, None) if who == "teacher" else (None, student)
    parts = ("heldout", "generation", "tasks")
    found = measure(case, tmp_path, *models, tokenizer=tiny_tokenizer, parts=parts)
    assert f"{who}_ppl" in found["parts"]["heldout"] and "kl" not in found["parts"]["heldout"]
    assert found["parts"]["generation"] is None
    assert list(found["models"]) == [who]
    assert found["parts"]["tasks"]["rows"][0]["recovery"] is None


def test_mistakes_are_found_before_anything_runs(
    case: Path, teacher: Teacher, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    for settings, parts, message in (
        ({"recall_lengths_tokens": [20]}, tuple(PARTS), "too short"),
        ({"tasks": ["ltconvert_copyin"]}, tuple(PARTS), "unknown task"),
        ({}, ("speed",), "unknown part 'speed'"),
    ):
        with pytest.raises(UserError, match=message):
            measure(
                case,
                tmp_path,
                teacher,
                None,
                tokenizer=tiny_tokenizer,
                settings=settings,
                parts=parts,
            )
    with pytest.raises(UserError, match="nothing to evaluate"):
        measure(case, tmp_path, None, None, tokenizer=tiny_tokenizer)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        read_evaluation(tmp_path)


def test_evaluation_leaves_the_models_as_they_are(
    case: Path, teacher: Teacher, student: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    before = {name: value.clone() for name, value in student.state_dict().items()}
    measure(case, tmp_path, teacher, student, tokenizer=tiny_tokenizer, precision="bf16")
    after = student.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert student.dtype == torch.float32 and not student.training


def test_only_what_there_is_to_measure_is_named(
    case: Path,
    teacher: Teacher,
    student: Any,
    tiny_tokenizer: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A dense teacher and student without tasks; twice, the second time all is kept."""
    for line in ("{} ...", "{} measured before, kept"):
        none = {"tasks": []}
        found = measure(case, tmp_path, teacher, student, tokenizer=tiny_tokenizer, settings=none)
        shown = capsys.readouterr()
        named = [name for name in PARTS if line.format(name) in shown.out + shown.err]
        assert named == ["heldout", "recall", "generation", "decode"]
        assert [name for name in PARTS if found["parts"][name] is None] == [
            "loops", "depth", "routing", "tasks",
        ]  # fmt: skip
