"""The report holds the run's numbers, needs nothing but itself, and says what was not run."""

from __future__ import annotations

import base64
import json
import re
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ltconvert.distill.report import build_report, show_evaluation
from ltconvert.distill.reporting.run_folder import read_run
from ltconvert.distill.reporting.tables import NOT_RUN, number, percent, runs, size
from ltconvert.distill.summary import rises
from ltconvert.errors import UserError

TITLES = (
    "Stages",
    "Recall",
    "Tasks",
    "Held-out text",
    "Generation",
    "Decode",
    "Layers",
    "Selection",
    "Training",
    "Settings",
)
PLOTS = (
    "kl_by_stage",
    "recall_needle",
    "kl_by_position",
    "decode",
    "layer_map",
    "selection",
    "loss_curves",
)


def cell(accuracy: float) -> dict[str, Any]:
    depth = {d: {"accuracy": accuracy, "stderr": 0.1, "examples": 4} for d in ("0", "0.5", "1")}
    return {"accuracy": accuracy, "stderr": 0.05, "nll": 1.0, "examples": 12, "by_depth": depth}


def evaluation() -> dict[str, Any]:
    """An ``evaluation.json`` with numbers that stand out."""
    rows = [
        {
            "task": "arc_easy",
            "metric": "acc",
            "group": True,
            "samples": 321,
            "random": 0.25,
            "teacher": 0.4731,
            "teacher_stderr": 0.0211,
            "student": 0.4456,
            "student_stderr": 0.0222,
            "recovery": 0.8777,
            "recovery_stderr": 0.0543,
        }
    ]
    points = [
        {"context": 1024, "ms_per_token": 12.34, "tokens_per_second": 81, "cache_bytes": 2**21}
    ]
    return {
        "models": {
            "teacher": {
                "name": "tea<cher",
                "source": "pkg",
                "revision": "1.2",
                "remarks": ["Q4_1"],
            },
            "student": {"mixers": ["full", "gdn", "gdn"], "loops": 2},
        },
        "versions": {"torch": "9.8.7"},
        "parts": {
            "heldout": {
                "kl": 0.12345,
                "kl_stderr": 0.00321,
                "teacher_ppl": 11.11,
                "teacher_ppl_stderr": 0.1,
                "student_ppl": 22.22,
                "student_ppl_stderr": 0.2,
                "agreement": 0.777,
                "agreement_stderr": 0.01,
                "tokens": 5432,
                "rows": 9,
                "kl_by_position": [
                    {"first": 0, "end": 16, "kl": 0.3131, "kl_stderr": 0.01, "tokens": 77}
                ],
            },
            "recall": {
                "teacher": {"needle": {"512": cell(1.0)}},
                "student": {"needle": {"512": cell(0.25)}},
            },
            "generation": {
                "prompts": 2,
                "tokens": 8,
                "common_prefix": 4.5,
                "common_prefix_stderr": 0.5,
                "equal_share": 0.66,
                "equal_share_stderr": 0.1,
                "followed_share": 0.88,
                "followed_share_stderr": 0.1,
                "examples": [{"prompt": "A ``` <b>", "teacher": "x | y", "student": "z"}],
            },
            "decode": {"teacher": points, "student": points},
            "tasks": {"teacher": {}, "student": {}, "rows": rows},
        },
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder as a finished run leaves it."""
    folder = tmp_path / "run"
    for name, kl in (("start", 3.9876), ("align", 1.2345), ("logits", 1.3456)):
        (folder / "stages" / name).mkdir(parents=True)
        record = {
            "stage": name,
            "status": "finished",
            "facts": {"tokens": 40960, "seconds": 90.0},
            "scores": {
                "kl": kl,
                "kl_stderr": 0.01,
                "student_ppl": 33.3,
                "teacher_ppl": 11.1,
                "tokens": 5432,
            },
        }
        (folder / "stages" / name / "stage.json").write_text(json.dumps(record))
    (folder / "stages" / "longctx").mkdir()
    running = {"stage": "longctx", "status": "running"}
    (folder / "stages" / "longctx" / "stage.json").write_text(json.dumps(running))
    (folder / "stages" / "select").mkdir()
    selection = {
        "method": "kl-fast",
        "direction": "both",
        "loops": 2,
        "chosen": [0],
        "ranking": [0, 2, 1],
        "main": "gain",
        "scores": {"gain": [0.9191, None, 0.2]},
        "stopped_early": True,
        "cost": {"tokens": 128, "forwards": 24.0, "trained_tokens": 0, "seconds": 3},
        "set": "--set student.full_layers=[0]",
    }
    (folder / "stages" / "select" / "selection.json").write_text(json.dumps(selection))
    lines = [{"stage": "align", "step": i, "tokens": 64 * i, "loss": 2.5 / i} for i in range(1, 6)]
    text = "\n".join(map(json.dumps, lines)) + '\n{"stage": "ali'
    (folder / "metrics.jsonl").write_text(text)
    (folder / "recipe.resolved.yaml").write_text("name: hybrid25\nseed: 0\n")
    owner = {"teacher": "tea<cher", "recipe": "hybrid25", "precision": "bf16"}
    (folder / "run.json").write_text(json.dumps(owner))
    (folder / "evaluation.json").write_text(json.dumps(evaluation()))
    (folder / "student").mkdir()
    (folder / "student" / "config.json").write_text("{}")
    provenance = {"teacher": {"name": "Ouro", "source": "ByteDance/Ouro-1.4B"}}
    (folder / "student" / "provenance.json").write_text(json.dumps(provenance))
    return folder


class Page(HTMLParser):
    """Pictures, links, text, and whether every element that was opened is closed."""

    VOID = ("meta", "img", "br", "link", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "img":
            self.images.append(values["src"] or "")
            assert values["alt"]
        self.links += [v for k, v in values.items() if k in ("href", "src") and tag != "img" and v]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


NUMBERS = (
    "3.9876 ± 0.0100",
    "1.2345 ± 0.0100",
    "0.1235 ± 0.0032",
    "22.22 ± 0.20",
    "77.7 % ± 1.0",
    "40,960",
    "1.5",  # minutes
    "25.0 % ± 5.2",  # recall's recovery
    "87.8 % ± 5.4",
    "0.446 ± 0.022",
    "321",
    "0.3131 ± 0.0100",
    "4.5 ± 0.5",
    "12.3",
    "2.0 MiB",
    "0.9191",
    "--set student.full_layers=[0]",
    "9.8.7",
    "hybrid25",
)


def test_the_numbers_are_in_both_reports(run_dir: Path) -> None:
    build_report(run_dir)
    markdown = (run_dir / "report.md").read_text()
    page = Page((run_dir / "report.html").read_text())
    for shown in NUMBERS:
        assert shown in markdown and shown in page.text, shown
    for title in TITLES:
        assert f"## {title}\n" in markdown and title in page.text
    assert NOT_RUN not in markdown and NOT_RUN not in page.text
    assert "After logits the KL is above that after align (1.3456 against 1.2345)." in markdown
    assert "Stage longctx has begun and is not finished." in page.text


def test_html_needs_nothing_but_itself(run_dir: Path) -> None:
    build_report(run_dir)
    source = (run_dir / "report.html").read_text()
    page = Page(source)
    assert page.open == []
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in source and "url(" not in source and "<script" not in source
    assert len(page.images) == len(PLOTS)
    for image in page.images:
        png = base64.b64decode(image.removeprefix("data:image/png;base64,"), validate=True)
        assert png[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = struct.unpack(">II", png[16:24])
        assert 300 < width < 3000 and 100 < height < 3000


def test_text_from_models_cannot_break_the_pages(run_dir: Path) -> None:
    build_report(run_dir)
    source = (run_dir / "report.html").read_text()
    assert "<b>" not in source and "A ``` &lt;b&gt;" in source and "tea&lt;cher" in source
    markdown = (run_dir / "report.md").read_text()
    assert "````text\n[prompt]\nA ``` <b>" in markdown


def test_pictures_of_the_markdown_are_there(run_dir: Path) -> None:
    build_report(run_dir)
    found = re.findall(r"!\[.+\]\((.+)\)", (run_dir / "report.md").read_text())
    assert sorted(found) == sorted(f"report_plots/{name}.png" for name in PLOTS)
    assert all((run_dir / name).read_bytes()[:4] == b"\x89PNG" for name in found)


def test_the_same_folder_gives_the_same_report(run_dir: Path) -> None:
    paths = build_report(run_dir)
    first = [path.read_bytes() for path in paths]
    assert [path.read_bytes() for path in build_report(run_dir)] == first
    assert list(run_dir.rglob("*.tmp")) == []


def test_an_empty_folder_says_not_run_everywhere(tmp_path: Path) -> None:
    assert [path.name for path in build_report(tmp_path)] == ["report.md", "report.html"]
    markdown = (tmp_path / "report.md").read_text()
    assert markdown.count(f"_{NOT_RUN}_") == len(TITLES)
    page = Page((tmp_path / "report.html").read_text())
    assert page.text.count(NOT_RUN) == len(TITLES) and page.images == []


@pytest.mark.parametrize("part", ["recall", "generation", "tasks", "decode", "heldout"])
def test_one_missing_part_is_named_and_the_rest_stays(run_dir: Path, part: str) -> None:
    whole = evaluation()
    whole["parts"][part] = None
    (run_dir / "evaluation.json").write_text(json.dumps(whole))
    build_report(run_dir)
    markdown = (run_dir / "report.md").read_text()
    title = {"heldout": "Held-out text"}.get(part, part.capitalize())
    assert f"## {title}\n\n_{NOT_RUN}_" in markdown
    assert markdown.count(NOT_RUN) == 1


def test_models_of_different_limits_keep_their_columns(run_dir: Path) -> None:
    whole = evaluation()
    point = whole["parts"]["decode"]["teacher"][0]
    longer = point | {"context": 4096, "ms_per_token": 56.7}
    whole["parts"]["decode"]["student"] = [point | {"ms_per_token": 5.6}, longer]
    (run_dir / "evaluation.json").write_text(json.dumps(whole))
    build_report(run_dir)
    text = (run_dir / "report.md").read_text()
    assert "| 1,024 | 12.3 | 5.6 | 2.0 MiB | 2.0 MiB |" in text
    assert "| 4,096 | - | 56.7 | - | 2.0 MiB |" in text


def test_half_a_character_in_a_name_costs_no_report(run_dir: Path) -> None:
    whole = evaluation()
    whole["models"]["teacher"]["source"] = "/data/caf\udce9"  # a folder that is not UTF-8
    (run_dir / "evaluation.json").write_text(json.dumps(whole))
    build_report(run_dir)
    assert "/data/caf?" in (run_dir / "report.html").read_text(encoding="utf-8")


def test_generation_without_prompts_says_why(run_dir: Path) -> None:
    whole = evaluation()
    whole["parts"]["generation"] |= {"prompts": 0, "examples": []}
    (run_dir / "evaluation.json").write_text(json.dumps(whole))
    build_report(run_dir)
    markdown = (run_dir / "report.md").read_text()
    assert "## Generation\n\nNo held-out document is long enough for a prompt." in markdown
    assert NOT_RUN not in markdown


def test_one_model_alone_has_a_report(tmp_path: Path) -> None:
    whole = evaluation()
    del whole["models"]["student"]
    for name in ("recall", "decode"):
        del whole["parts"][name]["student"]
    whole["parts"]["heldout"] = {"teacher_ppl": 12.34, "tokens": 99, "rows": 3}
    whole["parts"]["generation"] = None
    row = whole["parts"]["tasks"]["rows"][0]
    row |= {"student": 0.4731, "teacher": None, "teacher_stderr": None, "recovery": None}
    del whole["parts"]["tasks"]["student"]
    (tmp_path / "evaluation.json").write_text(json.dumps(whole))
    build_report(tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    assert "| teacher perplexity | 12.34 |" in markdown
    assert "| kind | tokens | teacher |\n" in markdown
    assert "| 0.473 ± 0.022 | - | - |" in markdown


def test_recall_at_no_length_was_not_run(tmp_path: Path) -> None:
    whole = evaluation()
    whole["parts"]["recall"] = {who: {"needle": {}} for who in ("teacher", "student")}
    (tmp_path / "evaluation.json").write_text(json.dumps(whole))
    build_report(tmp_path)
    assert f"## Recall\n\n_{NOT_RUN}_" in (tmp_path / "report.md").read_text()
    assert "Recall" not in show_evaluation(tmp_path)


def test_a_rise_is_one_that_can_be_seen() -> None:
    assert rises(1.2345, 1.2346) and not rises(0.00070, 0.00074) and not rises(0.1, 0.1)


def test_the_model_card_names_teacher_layers_and_scores(run_dir: Path) -> None:
    card = run_dir / "student" / "README.md"
    assert card in build_report(run_dir)
    text = card.read_text()
    assert text.startswith("---\n") and 'base_model: "ByteDance/Ouro-1.4B"' in text
    assert "A student of Ouro (2 loops)" in text and "with the recipe hybrid25" in text
    assert "- full: 1 of 3 layers, 0" in text and "- gdn: 2 of 3 layers, 1-2" in text
    assert "1.2345 ± 0.0100" in text and "87.8 % ± 5.4" in text
    assert "trust_remote_code=True" in text


def test_the_terminal_shows_what_was_measured(run_dir: Path) -> None:
    shown = show_evaluation(run_dir)
    for text in ("22.22 ± 0.20", "87.8 % ± 5.4", "25.0 % ± 5.2", "2.0 MiB"):
        assert text in shown
    assert max(map(len, shown.splitlines())) <= 110


def test_damaged_files_are_one_line(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "evaluation.json").write_text("{")
    with pytest.raises(UserError, match=r"evaluation\.json is damaged; delete it"):
        build_report(run_dir)
    with pytest.raises(UserError, match="no run folder"):
        build_report(tmp_path / "gone")


def test_a_half_written_metrics_line_is_left_out(run_dir: Path) -> None:
    assert [line["step"] for line in read_run(run_dir).metrics["align"]] == [1, 2, 3, 4, 5]


def test_cells() -> None:
    assert number(0.12345, 0.01) == "0.123 ± 0.010" and number(None) == "-"
    assert number(float("nan"), 0.1) == percent(float("nan"), 0.1) == "nan"
    assert number(0.5, float("nan"), 1) == "0.5" and percent(0.5, float("inf")) == "50.0 %"
    assert number(5e21, 3e20, 2) == "5e+21 ± 3e+20" and percent(-1e-9) == "0.0 %"
    assert number(-1e-9, digits=4) == "0.0000" and number(-0.25, digits=1) == "-0.2"
    assert percent(0.5) == "50.0 %" and percent(None) == "-"
    assert size(512) == "512 B" and size(3 * 2**20) == "3.0 MiB"
    assert runs([5, 0, 4, 9, 6]) == "0, 4-6, 9" and runs([]) == "none"
