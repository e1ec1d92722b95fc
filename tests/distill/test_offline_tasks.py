"""The offline lm-eval tasks, the user's own task files, baselines, and mistakes in one line."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_model, tiny_spec

from ltconvert.distill.evaluation.lm_eval import run_tasks
from ltconvert.distill.evaluation.offline_tasks import FOLDER, GROUP, documents
from ltconvert.distill.evaluation.offline_tasks.grammar import PHENOMENA
from ltconvert.distill.evaluation.task_content import own_content
from ltconvert.distill.evaluation.task_files import check_tasks, load_tasks
from ltconvert.distill.evaluation.task_scores import compare, summarise
from ltconvert.errors import UserError

MEMBERS = [f"ltconvert_{name}" for name in ("needle", "copying", "last_word", "minimal_pairs")]
# Tasks of lm-eval itself take seconds to index: a test that needs them finds this one.
OWN_TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(tiny_spec(max_position_embeddings=4096), ["gdn", "full", "gdn"])


def own_task(folder: Path, name: str, data: str = "own.jsonl") -> Path:
    """A multiple-choice task of three documents with two, three and four choices."""
    folder.mkdir(exist_ok=True)
    rows = [
        {"query": "the cat", "choices": ["sat", "ran", "hid", "ate"][:n], "gold": 0}
        for n in (2, 3, 4)
    ]
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = folder / f"{name}.yaml"
    path.write_text(OWN_TASK.format(name=name, data=data, kind="multiple_choice"))
    return path


def test_documents_are_the_same_every_time_and_no_two_alike() -> None:
    for make in (documents.needle, documents.copying, documents.minimal_pairs):
        one, two = (list(make(documents=30)["test"]) for _ in range(2))
        assert one == two and len({json.dumps(d, sort_keys=True) for d in one}) == 30
        assert list(make(documents=10)["test"]) == one[:10]


def test_needle_states_its_answer_once() -> None:
    for document in documents.needle(documents=20)["test"]:
        key = document["context"].rsplit("The secret number of the ", 1)[1].removesuffix(" is")
        stated = f"The secret number of the {key} is {document['answer']}."
        assert document["context"].count(stated) == 1


def test_copying_goes_on_where_the_second_list_stops() -> None:
    for document in documents.copying(documents=20)["test"]:
        first, second = document["context"].split(".\nThe same list: ")
        whole = first.removeprefix("First list: ").split()
        begun, asked = second.split(), document["answer"].split()
        assert whole[: len(begun) + len(asked)] == begun + asked and len(whole) == 16


def test_minimal_pairs_differ_in_form_alone() -> None:
    pairs = list(documents.minimal_pairs(documents=200)["test"])
    assert {pair["phenomenon"] for pair in pairs} == {name for name, _ in PHENOMENA}
    for pair in pairs:
        good, bad = pair["good"].rstrip(".").split(), pair["bad"].rstrip(".").split()
        differing = [words for words in zip(good, bad, strict=True) if words[0] != words[1]]
        assert len(differing) == 1


def test_a_model_that_makes_no_numbers_guesses(model: Any, tiny_tokenizer: Any) -> None:
    damaged = copy.deepcopy(model)
    damaged.model.embed_tokens.weight.data.fill_(math.nan)
    found = run_tasks(damaged, tiny_tokenizer, ["ltconvert_minimal_pairs"], limit=10)
    assert found["ltconvert_minimal_pairs"]["metrics"]["acc"]["value"] == 0.5


def test_verbs_agree_with_the_subject_and_not_with_the_nearer_noun() -> None:
    makers = dict(PHENOMENA)
    for seed in range(50):
        good, _ = makers["agreement_across_phrase"](random.Random(seed))
        words = good.split()
        subject, other, verb = words[1], words[4], words[5]
        assert subject.endswith("s") != other.endswith("s")
        assert (verb in ("are", "were", "have")) == subject.endswith("s")


def test_last_words_come_from_sentences_with_their_context() -> None:
    text = "Short one here. " + "This sentence is long enough to be asked about today."
    text += "\n\nThe next paragraph has a sentence that ends in `code`."
    (only,) = documents.last_words(text)
    assert only["answer"] == "today"
    assert only["context"].endswith(
        "Short one here. This sentence is long enough to be asked about"
    )


def test_last_words_are_held_out_text() -> None:
    from ltconvert.distill.data import documents as texts
    from ltconvert.recipes.data import DataSettings

    held = " ".join(" ".join(texts(DataSettings(), "heldout")).split())
    found = documents.last_word()["test"]
    assert len(found) > 30  # Python's own documentation: 69 in 3.11, 41 in 3.13
    for document in found:
        assert f"{document['context'].split('.')[-1]} {document['answer']}." in held


def test_the_group_runs_by_name(model: Any, tiny_tokenizer: Any) -> None:
    state = torch.get_rng_state(), random.getstate()
    found = run_tasks(model, tiny_tokenizer, [GROUP], limit=2, batch_size=2)
    assert torch.equal(torch.get_rng_state(), state[0]) and random.getstate() == state[1]
    assert set(found) == {GROUP, *MEMBERS}
    assert found[GROUP]["group"] and found[GROUP]["samples"] == 8
    guesses = [found[name]["metrics"]["acc"]["random"] for name in MEMBERS]
    assert guesses == [0.0, 0.0, 0.0, 0.5]
    assert found[GROUP]["metrics"]["acc"]["random"] == 0.125
    values = [found[name]["metrics"]["acc"]["value"] for name in MEMBERS]
    assert found[GROUP]["metrics"]["acc"]["value"] == pytest.approx(sum(values) / 4)
    assert found[MEMBERS[3]]["metrics"]["acc"]["stderr"] is not None


def test_lm_eval_finds_them_with_include_path_alone() -> None:
    from lm_eval.tasks import TaskManager

    loaded = TaskManager(include_path=str(FOLDER), include_defaults=False).load([GROUP])
    assert list(loaded["tasks"]) == MEMBERS
    task = loaded["tasks"]["ltconvert_needle"]
    document = next(iter(task.test_docs()))
    assert task.doc_to_target(document) == " " + document["answer"]


def test_nothing_is_printed(model: Any, tiny_tokenizer: Any, capfd: Any) -> None:
    run_tasks(model, tiny_tokenizer, ["ltconvert_copying"], limit=2)
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


@pytest.mark.parametrize("how", ["file", "folder", "include_path"])
def test_a_users_own_task_finds_its_data_beside_it(
    model: Any, tiny_tokenizer: Any, tmp_path: Path, how: str
) -> None:
    path = own_task(tmp_path / "mine", f"own_{how}")
    tasks = {"file": [str(path)], "folder": [str(path.parent)], "include_path": [path.stem]}[how]
    include = path.parent if how == "include_path" else None
    found = run_tasks(model, tiny_tokenizer, tasks, include_path=include)
    (scores,) = found.values()
    assert list(found) == [f"own_{how}"] and scores["samples"] == 3
    assert scores["metrics"]["acc"]["random"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)


@pytest.mark.parametrize("how", ["file", "folder", "include_path"])
def test_a_change_of_an_own_task_or_its_data_is_seen(tmp_path: Path, how: str) -> None:
    path = own_task(tmp_path / "mine", "own")
    tasks = {"file": [str(path)], "folder": [str(path.parent)], "include_path": ["own"]}[how]
    include = path.parent if how == "include_path" else None
    first = own_content(tasks, include)
    assert first is not None and own_content(tasks, include) == first
    (path.parent / "notes.txt").write_text("no part of it")
    assert own_content(tasks, include) == first
    data = path.parent / "own.jsonl"
    data.write_text(data.read_text().replace("sat", "lay"))
    second = own_content(tasks, include)
    path.write_text(path.read_text() + "num_fewshot: 1\n")
    assert len({first, second, own_content(tasks, include)}) == 3
    assert own_content(["ltconvert_offline"], None) is None


def test_accuracy_is_that_of_the_likeliest_choice(
    model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    path = own_task(tmp_path / "mine", "own_check")
    found = run_tasks(model, tiny_tokenizer, [str(path)], batch_size=1)
    right = []
    for n in (2, 3, 4):
        scores = []
        for choice in ["sat", "ran", "hid", "ate"][:n]:
            context = tiny_tokenizer("the cat", add_special_tokens=False)["input_ids"]
            rest = tiny_tokenizer(" " + choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([context + rest])).logits[0]
            log_probs = logits.double().log_softmax(-1)[len(context) - 1 : -1]
            scores.append(float(log_probs.gather(1, torch.tensor(rest)[:, None]).sum()))
        right.append(max(range(n), key=scores.__getitem__) == 0)
    assert found["own_check"]["metrics"]["acc"]["value"] == pytest.approx(sum(right) / 3)


def test_a_saved_folder_runs_like_the_live_model(
    model: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    from ltconvert.convert.checkpoint import save_student

    save_student(model, tiny_tokenizer, tmp_path / "student", {})
    names = ["ltconvert_minimal_pairs"]
    live = run_tasks(model, tiny_tokenizer, names, limit=4)
    assert run_tasks(tmp_path / "student", None, names, limit=4) == live


def test_an_unknown_task_names_its_neighbours() -> None:
    with pytest.raises(UserError) as caught:
        check_tasks(["ltconvert_needles"])
    assert "unknown task 'ltconvert_needles'; near names: ltconvert_needle" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_mistyped_task_of_lm_eval_names_its_neighbours() -> None:
    with pytest.raises(UserError, match=r"unknown task 'arc_esy'; near names: arc_easy"):
        check_tasks(["arc_esy"])


def test_missing_files_and_data_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no task file .*gone\.yaml"):
        check_tasks([str(tmp_path / "gone.yaml")])
    with pytest.raises(UserError, match="no folder"):
        check_tasks([GROUP], tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no lm-eval task"):
        check_tasks([str(tmp_path / "empty")])
    path = own_task(tmp_path / "mine", "own_gone", data="gone.jsonl")
    with pytest.raises(UserError, match=r"own_gone.*its data is not there") as caught:
        load_tasks([str(path)])
    assert "\n" not in str(caught.value)
    path.write_text("task: [")
    with pytest.raises(UserError, match=r"not a YAML file: .* in line 2"):
        load_tasks([str(path)])


def test_a_hub_task_offline_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "hub.yaml"
    path.write_text(
        "task: on_the_hub\ndataset_path: allenai/ai2_arc\ntest_split: test\n"
        "doc_to_text: x\ndoc_to_target: y\n"
    )
    with pytest.raises(UserError, match="hub, which cannot be reached") as caught:
        load_tasks([str(path)])
    assert "\n" not in str(caught.value) and "ltconvert_offline" in str(caught.value)


def raw_results(**metrics: Any) -> dict[str, Any]:
    """lm-eval's results of one task of two documents with two choices each."""
    sample = {"resps": [[0], [0]]}
    return {
        "results": {"t": {"alias": "t", **metrics}},
        "configs": {"t": {"output_type": "multiple_choice"}},
        "samples": {"t": [sample | {"doc_id": 0}, sample | {"doc_id": 1}, sample | {"doc_id": 1}]},
        "higher_is_better": {"t": {"acc": True}},
    }


def test_a_missing_standard_error_is_none_not_text() -> None:
    raw = raw_results(**{"acc,none": 0.75, "acc_stderr,none": "N/A", "word_perplexity,none": 9.0})
    metrics = summarise(raw)["t"]["metrics"]
    assert metrics["acc"] == {
        "value": 0.75,
        "stderr": None,
        "higher_is_better": True,
        "random": 0.5,
    }
    assert metrics["word_perplexity"]["random"] is None
    assert summarise(raw)["t"]["samples"] == 2


def test_filters_keep_their_names() -> None:
    raw = raw_results(**{"exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1})
    (name,) = summarise(raw)["t"]["metrics"]
    assert name == "exact_match,strict"
    assert summarise(raw)["t"]["metrics"][name]["random"] == 0.0


@pytest.mark.parametrize(("by_size", "expected"), [(True, 0.35), (False, 0.375)])
def test_a_groups_guess_is_the_mean_that_the_group_takes(by_size: bool, expected: float) -> None:
    """Four documents with two choices, six with four: by documents (4 / 2 + 6 / 4) / 10."""
    documents = {"two": (4, 2), "three": (6, 4), "free": (5, 1)}
    raw: dict[str, Any] = {
        "results": {"two": {"acc,none": 0.5}, "three": {"acc,none": 0.5}, "free": {"f1,none": 0.1}},
        "configs": {name: {"output_type": "multiple_choice"} for name in documents},
        "samples": {
            name: [{"doc_id": i, "resps": [[0]] * choices} for i in range(count)]
            for name, (count, choices) in documents.items()
        },
        "group_subtasks": {"group": list(documents)},
    }
    raw["results"]["group"] = {"acc,none": 0.5}
    found = summarise(raw, {"group": {"acc": by_size}})
    assert found["group"]["metrics"]["acc"]["random"] == pytest.approx(expected)
    assert found["free"]["metrics"]["f1"]["random"] is None  # of choices: not known


def test_recovery_takes_guessing_off() -> None:
    teacher = summarise(raw_results(**{"acc,none": 0.9, "acc_stderr,none": 0.01}))
    student = summarise(raw_results(**{"acc,none": 0.7, "acc_stderr,none": 0.02}))
    (row,) = compare(teacher, student)
    assert row["recovery"] == pytest.approx(0.5)
    assert row["recovery_stderr"] == pytest.approx(((0.02) ** 2 + (0.5 * 0.01) ** 2) ** 0.5 / 0.4)
    (alone,) = compare(None, student)
    assert alone["teacher"] is None and alone["recovery"] is None and alone["student"] == 0.7


@pytest.mark.slow
def test_the_plain_lm_eval_command_runs_them(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "lm_eval", "run", "--model", "dummy", "--tasks", GROUP]
    command += ["--include_path", str(FOLDER), "--limit", "2", "--output_path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ltconvert_minimal_pairs" in done.stdout
