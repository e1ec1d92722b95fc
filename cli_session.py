"""What every verb of the command line shares: flags, the device, and how errors become exit codes.

Exit codes: 0 done, 1 a fault of ltconvert, 2 a mistake that the user can mend, 130 interrupted.
Nothing heavy is imported before a verb runs, so that `--help` answers at once.
"""

from __future__ import annotations

import enum
import functools
import inspect
import json
import os
import signal
import sys
import threading
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ltconvert.errors import Mistakes, UserError, out_of_memory

if TYPE_CHECKING:
    from pathlib import Path

    import torch

INTERRUPTED = 130


class Precision(enum.StrEnum):
    """Arithmetic of matrix products; weights stay in fp32 while they train."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"


class Kernel(enum.StrEnum):
    """Which implementation of an operation runs; an explicit choice never falls back."""

    auto = "auto"
    reference = "reference"
    triton = "triton"


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; the message says what was kept, when anything was running."""


@dataclass(frozen=True)
class Session:
    """The shared flags of one call."""

    device_name: str
    precision_name: str
    kernel: str
    json: bool
    verbose: bool
    debug: bool

    def device(self) -> torch.device:
        """The device that `--device` names; of several processes each gets its own GPU."""
        import torch

        name = self.device_name
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
        except RuntimeError:
            raise UserError(f"--device {name}: expected auto, cpu, cuda or cuda:N") from None
        if device.type == "cuda":
            device = _cuda(device)
        elif device.type != "cpu":
            raise UserError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
        else:
            os.environ["ACCELERATE_USE_CPU"] = "true"  # also where there is a GPU
        return device

    def precision(self, device: torch.device, run_dir: Path | None = None) -> tuple[str, str]:
        """(`fp32` or `bf16`, why), see ``precision_of_run``."""
        from ltconvert.distill.processes import join_processes
        from ltconvert.distill.run_identity import precision_of_run

        join_processes(device)
        return precision_of_run(device, run_dir, self.precision_name)

    def choose_kernels(self, device: torch.device) -> list[tuple[str, str, str]]:
        """Make `--kernel` the default of this process; (operation, backend, why) a row.

        Raises:
            UserError: the backend asked for cannot run here.
        """
        from ltconvert.kernels import dispatch

        try:
            rows = dispatch.table(self.kernel, device)
        except ValueError as error:
            raise UserError(f"--kernel {self.kernel}: {error}") from None
        dispatch.set_default(self.kernel)
        return rows


def _cuda(device: torch.device) -> torch.device:
    """A CUDA device that exists; without an index that of this process."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise UserError(
            f"--device {device}: torch {torch.__version__} sees no GPU here; use --device cpu"
        )
    index = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise UserError(f"--device {device}: there are {count} GPUs, counted from 0, not {index}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


_SHARED: dict[str, tuple[Any, Any]] = {
    "device": (
        Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel="Shared")],
        "auto",
    ),
    "precision": (
        Annotated[
            Precision,
            typer.Option(
                help="auto: bf16 if the GPU has it, or a CPU is measured to be faster so.",
                rich_help_panel="Shared",
            ),
        ],
        Precision.auto,
    ),
    "kernel": (
        Annotated[Kernel, typer.Option(help="Backend of the kernels.", rich_help_panel="Shared")],
        Kernel.auto,
    ),
    "as_json": (
        Annotated[
            bool,
            typer.Option("--json", help="Print one JSON document.", rich_help_panel="Shared"),
        ],
        False,
    ),
    "verbose": (
        Annotated[
            bool, typer.Option("--verbose", "-v", help="Say more.", rich_help_panel="Shared")
        ],
        False,
    ),
    "debug": (
        Annotated[
            bool,
            typer.Option("--debug", help="Traceback on errors.", rich_help_panel="Shared"),
        ],
        False,
    ),
}


def with_session(verb: Callable[..., None]) -> Callable[..., None]:
    """Give `verb(session, ...)` the shared flags as options of its own.

    Typer reads a command's options from its signature, so the flags are put there, once for all.
    """

    @functools.wraps(verb)
    def command(**options: Any) -> None:
        shared = {name: options.pop(name) for name in _SHARED}
        session = Session(
            device_name=shared["device"],
            precision_name=str(shared["precision"]),
            kernel=str(shared["kernel"]),
            json=shared["as_json"],
            verbose=shared["verbose"],
            debug=shared["debug"],
        )
        prepare(session)
        try:
            with _sigterm_as_ctrl_c():
                verb(session, **options)
        except KeyboardInterrupt as interrupt:
            # Typer would turn it into a bare exit code, and the message would be lost.
            raise Interrupted(str(interrupt)) from interrupt

    hints = typing.get_type_hints(verb, include_extras=True)
    own = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(verb).parameters.items()
        if name != "session"
    ]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, (hint, default) in _SHARED.items()
    ]
    signature = inspect.Signature([*own, *shared])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return command


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """End on SIGTERM as on Ctrl-C, with a line that says what was kept."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def prepare(session: Session) -> None:
    """Keep libraries from talking over the output; `-v` lets them."""
    if not session.verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("DATASETS_VERBOSITY", "error")
        # How a published config spells a setting is nothing that the user could mend.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    if not sys.stderr.isatty():  # on a terminal a long download shows its progress
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def run(app: typer.Typer, arguments: list[str]) -> int:
    """Run the command line; every exception becomes a line on stderr and an exit code."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    debug, as_json = "--debug" in options, "--json" in options
    try:
        code = int(app(args=arguments, prog_name="ltconvert", standalone_mode=False) or 0)
        return _fail("interrupted", code, as_json) if code == INTERRUPTED else code
    except (Interrupted, KeyboardInterrupt, typer.Abort) as interrupt:
        return _fail(str(interrupt) or "interrupted", INTERRUPTED, as_json)
    except BrokenPipeError:
        # The reader of a pipe left (`| head`); Python would complain again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        message, code = explain(error)
        if code == 1 and not debug:
            message += " (a fault of ltconvert; rerun with --debug for the traceback)"
        return _fail(message, code, as_json)


def explain(error: Exception) -> tuple[str, int]:
    """(one line, exit code) for an exception; of several mistakes one line each."""
    if isinstance(error, Mistakes):
        return str(error), 2
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, UserError):
        return text, 2
    if hasattr(error, "format_message"):  # a wrong call, as the command-line parser found it
        message = " ".join(error.format_message().split()) or "no command given"
        return f"{message.rstrip('.')}; see --help", 2
    name = type(error).__name__
    if out_of_memory(error):
        advice = "lower micro_batch_rows or seq_len_tokens of the stage, see `ltconvert plan`"
        return f"out of memory: {advice} ({text[:160]})", 2
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or text}", 2
    return f"{name}: {text}", 1


def _fail(message: str, code: int, as_json: bool) -> int:
    """Print the error, a line each, and with `--json` a document that holds it."""
    if as_json and os.environ.get("RANK", "0") == "0":
        print(json.dumps({"error": message, "exit_code": code}))
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)
    return code
