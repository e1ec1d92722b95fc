"""The command line: one function a verb, which parses, calls and prints.

Nothing heavy is imported before a verb runs; `ltconvert --help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ltconvert import __version__
from ltconvert import cli_output as output
from ltconvert.cli_session import Session, run, with_session
from ltconvert.errors import Mistakes, UserError

if TYPE_CHECKING:
    from ltconvert.recipes.schema import Recipe

app = typer.Typer(
    name="ltconvert",
    help="Turn a pretrained language model into a linear-time student that behaves the same.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipes_app = typer.Typer(
    help="The recipes that ship, and checks of your own.", no_args_is_help=True
)
app.add_typer(recipes_app, name="recipes")
bench_app = typer.Typer(help="Measurements of this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

Teacher = Annotated[
    str, typer.Option("--teacher", help="smollm2-135m, a .gguf file, a folder or a hub id.")
]
Revision = Annotated[str | None, typer.Option(help="Hub revision of the teacher.")]
RecipeName = Annotated[
    str, typer.Option("--recipe", help="A name of `recipes list`, or the path of a YAML.")
]
Budget = Annotated[
    str | None,
    typer.Option("--budget", help="demo, small or full: token budgets, and rates that suit them."),
]
Data = Annotated[
    str | None,
    typer.Option("--data", help="pydoc, a file or folder (jsonl, parquet, txt), or a hub id."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting of the recipe; repeatable."),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Run folder; default: runs/<teacher>-<recipe>.")
]
Model = Annotated[str, typer.Argument(help="A student or run folder, or whatever --teacher takes.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        output.print_line(f"ltconvert {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Turn a pretrained language model into a linear-time student that behaves the same."""


@app.command()
@with_session
def distill(
    session: Session,
    teacher: Teacher,
    recipe: RecipeName = "hybrid25",
    budget: Budget = None,
    data: Data = None,
    out: Out = None,
    overrides: Overrides = None,
    revision: Revision = None,
) -> None:
    """Convert a teacher: all stages of its recipe, evaluation, report. Resumes by itself."""
    from ltconvert import cli_run

    resolved = _recipe(recipe, budget, data, overrides)
    cli_run.distill(session, resolved, teacher, out, revision)


@app.command("select-layers")
@with_session
def select_layers(
    session: Session,
    teacher: Teacher,
    recipe: RecipeName = "hybrid25",
    budget: Budget = None,
    data: Data = None,
    out: Out = None,
    overrides: Overrides = None,
    revision: Revision = None,
    per_loop: Annotated[
        bool, typer.Option("--per-loop", help="Looped teachers: a score for each layer and loop.")
    ] = False,
) -> None:
    """Rank the layers: which must stay full attention. `distill` with the same --out goes on."""
    from ltconvert import cli_select

    resolved = _recipe(recipe, budget, data, overrides)
    verb = cli_select.per_loop if per_loop else cli_select.select_layers
    verb(session, resolved, teacher, out, revision)


@app.command()
@with_session
def plan(
    session: Session,
    teacher: Teacher,
    recipe: RecipeName = "hybrid25",
    budget: Budget = None,
    data: Data = None,
    out: Out = None,
    overrides: Overrides = None,
    revision: Revision = None,
) -> None:
    """What a run will cost, before it starts: tokens, memory, disk, hours, selection."""
    from ltconvert import cli_run

    resolved = _recipe(recipe, budget, data, overrides)
    cli_run.plan(session, resolved, teacher, out, revision)


@app.command("eval")
@with_session
def evaluate(
    session: Session,
    teacher: Annotated[
        str | None, typer.Option("--teacher", help="Teacher; default: the student's own.")
    ] = None,
    student: Annotated[str | None, typer.Option("--student", help="Student or run folder.")] = None,
    tasks: Annotated[
        str | None, typer.Option(help="lm-eval task names, separated by commas.")
    ] = None,
    task_path: Annotated[
        Path | None, typer.Option(help="Folder with lm-eval task files of your own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents a task.")] = None,
    loop_cache: Annotated[
        str | None, typer.Option(help="last: also decode with the last loop's keys, and compare.")
    ] = None,
    exit_threshold: Annotated[
        list[float] | None,
        typer.Option(help="Also decode with early exit, and compare; repeatable."),
    ] = None,
    budget: Budget = None,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for report.md and report.html.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Score a teacher, a student, or both side by side with recovery and standard errors."""
    from ltconvert import cli_eval

    extra = [] if tasks is None else [f"eval.tasks={tasks}"]
    extra += [] if limit is None else [f"eval.task_limit={limit}"]
    extra += [] if loop_cache is None else [f"eval.loop_cache={loop_cache}"]
    extra += [] if not exit_threshold else [f"eval.exit_thresholds={exit_threshold}"]
    options = {} if data is None else {"data": {"source": data}}
    models = cli_eval.find(teacher, student)
    recipe = cli_eval.recipe_of(models, budget, options, [*extra, *(overrides or [])])
    cli_eval.run(session, models, recipe, task_path, out)


@app.command()
@with_session
def generate(
    session: Session,
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text; `-` reads stdin.")] = "-",
    chat: Annotated[bool, typer.Option(help="Put the prompt into the chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(min=0.01)] = 1.0,
    beams: Annotated[int, typer.Option(min=1, help="Beam search; the text comes at its end.")] = 1,
    seed: Annotated[int, typer.Option()] = 0,
    exit_threshold: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Leave the loops at this exit probability; 1: run them all."
        ),
    ] = None,
    loop_cache: Annotated[
        str, typer.Option(help="own, or last: loops share the last one's keys, a T-th of them.")
    ] = "own",
    depths: Annotated[
        int | None,
        typer.Option(min=1, help="A Dreamer's layer runs so often; default: as trained."),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Static cache; on a GPU one CUDA graph a token.")
    ] = False,
) -> None:
    """Continue a text with a student or a teacher, token by token."""
    from ltconvert import cli_generate

    settings = cli_generate.Sampling(
        max_new_tokens,
        temperature,
        top_p,
        top_k,
        repetition_penalty,
        beams,
        seed,
        exit_threshold,
        loop_cache,
    )
    text = cli_generate.read(prompt)
    asked = cli_generate.Prompt(text, chat or system is not None, system)
    cli_generate.run(session, model, asked, settings, fast=fast, depths=depths)


@app.command()
@with_session
def inspect(
    session: Session,
    model: Model,
    revision: Revision = None,
    match: Annotated[
        bool, typer.Option("--match", help="The Dreamer of the same size, speed and memory.")
    ] = False,
    hold: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=COUNT]", help="With --match: a number of it that stays."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="With --match: tokens of the rows that are counted in; 4096."),
    ] = None,
) -> None:
    """Layer map, parameters and cache bytes a token of a teacher or a student."""
    from ltconvert import cli_inspect, cli_match

    if match:
        cli_match.run(model, revision, hold or [], context or 4096, as_json=session.json)
        return
    if hold or context:
        raise UserError("--hold and --context are about the Dreamer of --match; add --match")
    cli_inspect.run(model, revision, as_json=session.json, verbose=session.verbose)


@app.command()
@with_session
def doctor(session: Session) -> None:
    """What this machine offers, and how to mend what it lacks."""
    from ltconvert import cli_doctor

    findings = cli_doctor.examine(session)
    if session.json:
        output.print_json(cli_doctor.as_document(findings))
    else:
        cli_doctor.show(findings)


@bench_app.command("decode")
@with_session
def bench_decode(
    session: Session,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A student or run folder, its teacher beside it; or as --teacher takes it, with a "
            "--recipe's student beside it. Configs alone are read."
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="In place of a model: ouro-1.4b, smollm2-135m, ...")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="As for `distill`; default: hybrid25.", show_default=False)
    ] = None,
    mixers: Annotated[
        str | None, typer.Option(help="Of the student: one for all but full layers, or a list.")
    ] = None,
    full: Annotated[
        str | None, typer.Option(help="Full layers: a share (0.25), a count or a list ([0,4]).")
    ] = None,
    contexts: Annotated[str, typer.Option(help="Tokens a row has read before.")] = "4k,8k,32k,128k",
    batch: Annotated[str, typer.Option(help="Rows at a time.")] = "1,8",
    steps: Annotated[int, typer.Option(min=1, help="Steps a row; the median counts.")] = 32,
    plain: Annotated[
        bool, typer.Option("--plain", help="Also a growing cache without a graph.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the JSON document there too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw tokens a second into a PNG.")] = None,
) -> None:
    """Speed of one-token steps, teacher beside student, and its share of the memory roofline.

    Weights are random. No prompt is read: lengths are set and caches filled with random numbers.
    On a GPU steps are replays of a CUDA graph between events. The roofline is the bytes a step
    cannot but move (weights of every visit, cache, states) at the speed of a copy measured here.
    """
    from ltconvert import cli_bench

    request = cli_bench.Request(
        model, shape, recipe, mixers, full, contexts, batch, steps, plain, save, plot
    )
    cli_bench.run(session, request)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Debug = Annotated[bool, typer.Option("--debug", help="Traceback on errors.")]


@recipes_app.command("list")
def list_recipes(as_json: AsJson = False, debug: Debug = False) -> None:
    """The recipes that ship with ltconvert, and the budgets."""
    from ltconvert import recipes

    rows = [(name, " ".join(recipes.load(name)["description"].split())) for name in recipes.names()]
    if as_json:
        output.print_json({"recipes": dict(rows), "budgets": recipes.budgets()})
        return
    output.print_table("", ("recipe", "what it makes"), rows)
    output.print_line(f"budgets: {', '.join(recipes.budgets())}")


@recipes_app.command("show")
def show_recipe(
    recipe: Annotated[str, typer.Argument(help="A name of `recipes list`, or a YAML.")],
    budget: Budget = None,
    data: Data = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Every setting of a recipe as a run would get it."""
    from ltconvert import recipes

    resolved = _recipe(recipe, budget, data, overrides)
    if as_json:
        output.print_json(resolved.model_dump(mode="json") | {"digest": recipes.digest(resolved)})
    else:
        output.print_line(recipes.dump(resolved).rstrip())


@recipes_app.command("check")
def check_recipes(
    files: Annotated[list[str], typer.Argument(help="Names or YAML files.")],
    budget: Budget = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Check recipes: all mistakes of all files, a line each, with the key meant; exit status 2."""
    from ltconvert import recipes
    from ltconvert.recipes.idle import idle_settings

    found, mistakes = {}, []
    for name in files:
        try:
            found[name] = _recipe(name, budget, None, overrides)
        except UserError as error:
            mistakes += str(error).splitlines()
    if as_json and not mistakes:
        output.print_json({name: recipes.digest(recipe) for name, recipe in found.items()})
    for name, recipe in () if as_json else found.items():
        output.print_line(f"{name}: ok ({recipes.digest(recipe)[:12]})")
        for line in idle_settings(recipe):
            output.print_line(f"  {line}")
    if mistakes:
        raise Mistakes(mistakes)


def _recipe(name: str, budget: str | None, data: str | None, overrides: list[str] | None) -> Recipe:
    """The resolved recipe; `--data X` is `--set data.source=X`, and `--set` itself wins."""
    from ltconvert import recipes

    settings: dict[str, Any] = {} if data is None else {"data": {"source": data}}
    return recipes.resolve(name, budget=budget, options=settings, overrides=overrides or [])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(app, sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
