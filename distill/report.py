"""``report.md``, ``report.html`` and the model card, built from a run folder's files alone."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ltconvert.distill.records import write_whole
from ltconvert.distill.reporting import (
    depth_section,
    evaluation_sections,
    routing_section,
    run_sections,
)
from ltconvert.distill.reporting.run_folder import RunFolder, read_run
from ltconvert.distill.reporting.tables import NOT_RUN, Section, number, percent, runs

PLOTS_FOLDER = "report_plots"
FULL = {"full", "moda"}  # full attention, whatever it reads besides


def build_report(run_dir: Path | str) -> list[Path]:
    """Write ``report.md`` (with its pictures in ``report_plots/``), ``report.html`` (one file that
    needs nothing else) and, where there is a student, its model card ``student/README.md``.

    Parts that were not run are named as such. The same folder gives the same report again.

    Returns:
        The files for a person to open: ``report.md``, ``report.html``, and the card if there is
        one.

    Raises:
        UserError: no such folder, or a file in it is damaged.
    """
    run = read_run(Path(run_dir))
    sections = all_sections(run)
    values = {
        "title": f"ltconvert: {run.name}",
        "summary": summary(run),
        "sections": sections,
        "not_run": NOT_RUN,
        "plots_folder": PLOTS_FOLDER,
    }
    pictures = run.folder / PLOTS_FOLDER
    pictures.mkdir(exist_ok=True)
    for plot in (plot for section in sections for plot in section.plots):
        write_whole(pictures / f"{plot.name}.png", plot.png)
    written = [run.folder / "report.md", run.folder / "report.html"]
    for path in written:
        write_whole(path, _render(f"{path.name}.j2", values))
    if (run.folder / "student" / "config.json").exists():
        written.append(run.folder / "student" / "README.md")
        write_whole(written[-1], model_card(run, sections))
    return written


def all_sections(run: RunFolder) -> list[Section]:
    """The report's sections in order; those that were not run are empty."""
    return [
        run_sections.stages(run),
        evaluation_sections.recall(run),
        evaluation_sections.tasks(run),
        evaluation_sections.heldout(run),
        evaluation_sections.generation(run),
        evaluation_sections.decode(run),
        *([evaluation_sections.loops(run)] if run.part("loops") else []),
        *([depth_section.depth(run)] if run.part("depth") else []),
        *([routing_section.routing(run)] if run.part("routing") else []),
        run_sections.layers(run),
        run_sections.selection(run),
        run_sections.training(run),
        run_sections.settings(run),
    ]


def summary(run: RunFolder) -> list[str]:
    """The few lines that a person reads first."""
    lines = []
    teacher = run.model("teacher") or {}
    if teacher:
        revision = f", revision {teacher['revision']}" if teacher.get("revision") else ""
        lines.append(f"Teacher: {teacher.get('name')} ({teacher.get('source')}{revision})")
        lines += [f"Teacher: {remark}" for remark in teacher.get("remarks", [])]
    if run.pools is not None:
        lines.append(run_sections.one_layer(run.pools, run.mixers))
    elif run.mixers:
        kept = [i for i, kind in enumerate(run.mixers) if kind in FULL]
        depth = ", with depth" if "moda" in run.mixers else ""
        lines.append(
            f"Full attention in {len(kept)} of {len(run.mixers)} layers: {runs(kept)}{depth}"
        )
    scores = run.part("heldout") or (run.stages[-1].get("scores") if run.stages else None) or {}
    if "kl" in scores:
        kl = number(scores["kl"], scores.get("kl_stderr"), 4)
        lines.append(
            f"KL to the teacher on held-out text: {kl} nats a token; perplexity "
            f"{number(scores['student_ppl'], digits=2)}, the teacher's is "
            f"{number(scores['teacher_ppl'], digits=2)}"
        )
    for row in (run.part("tasks") or {}).get("rows", []):
        if row["group"] and row["recovery"] is not None:
            share = percent(row["recovery"], row["recovery_stderr"])
            lines.append(f"Recovery on {row['task']}: {share} of the teacher's score")
    return lines


def model_card(run: RunFolder, sections: list[Section] | None = None) -> str:
    """The text of the student's README.md."""
    from ltconvert import __version__

    sections = all_sections(run) if sections is None else sections
    shown = {"Stages", "Recall", "Tasks", "Held-out text"}
    teacher = ((run.provenance or {}).get("teacher")) or run.owner or {}
    name = teacher.get("name") or (run.owner or {}).get("teacher") or "its teacher"
    source = str(teacher.get("source") or "")
    recipe = (run.owner or {}).get("recipe")
    values = {
        "title": f"{name}, {_make(run)} student",
        # A hub id; paths of the machine it was made on mean nothing elsewhere.
        "base_model": source if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else None,
        "teacher": name,
        "loops": f" ({run.loops} loops)" if run.loops > 1 else "",
        "version": __version__,
        "recipe": f" with the recipe {recipe}" if recipe else "",
        "layers": run_sections.layers(run).text,
        "sections": [s for s in sections if s.title in shown and s.tables],
    }
    return _render("model_card.md.j2", values)


def _make(run: RunFolder) -> str:
    """What a student is, in a word."""
    if run.pools is not None:
        return "depth-recurrent"
    mixers = run.mixers or []
    return "mixture-of-depths" if "moda" in mixers and set(mixers) <= FULL else "linear-time"


def show_evaluation(run_dir: Path | str) -> str:
    """The evaluation's tables for a terminal; parts that were not run are left out."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    run = read_run(Path(run_dir))
    page = Console(file=io.StringIO(), width=110)
    for section, table in _evaluation_tables(run):
        title = f"{section.title}: {table.caption}" if table.caption else section.title
        drawn = RichTable(
            title=title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            min_width=min(len(title), page.width),  # or the title would wrap at a narrow table
        )
        for index, header in enumerate(table.headers):
            drawn.add_column(header, justify="left" if index == 0 else "right")
        for row in table.rows:
            drawn.add_row(*row)
        page.print(drawn)
    return page.file.getvalue().rstrip()  # type: ignore[attr-defined]


def _evaluation_tables(run: RunFolder) -> Iterator[tuple[Section, Any]]:
    for make in ("heldout", "recall", "generation", "decode", "loops", "tasks"):
        section = getattr(evaluation_sections, make)(run)
        for table in section.tables[:1]:
            yield section, table


def _render(template: str, values: dict[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("ltconvert.distill", "reporting"),
        autoescape=template.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "base64": lambda png: base64.b64encode(png).decode(),
        "cell": lambda text: str(text).replace("|", "\\|").replace("\n", " "),
        "anchor": lambda text: re.sub(r"\W+", "-", text.lower()),
        "fenced": _fenced,
    }
    return environment.get_template(template).render(values)


def _fenced(text: str) -> str:
    """A Markdown code block around any text, fences in it included."""
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"
