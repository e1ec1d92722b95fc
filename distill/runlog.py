"""What a run tells while it goes on: metrics.jsonl, a live line on a terminal or plain lines."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ltconvert.distill.processes import is_main_process
from ltconvert.distill.progress import Bar, StepLine
from ltconvert.distill.records import write_whole

METRICS_FILE = "metrics.jsonl"
_PLAIN_SECONDS = 5.0  # between two plain lines
_LIVE_SECONDS = 0.1  # between two drawings of the live line


class RunLog:
    """Writes to the person and to `<run_dir>/metrics.jsonl`. Only the first process writes.

    Args:
        run_dir: None: metrics are not kept.
        console: where lines go; default: standard output, or standard error with `json`.
        json: standard output belongs to the command's one JSON result.
    """

    def __init__(
        self, run_dir: Path | None, console: Console | None = None, json: bool = False
    ) -> None:
        self.run_dir = run_dir
        self._main = is_main_process()
        stream = sys.stderr if json else sys.stdout
        self._console = console or Console(file=stream, highlight=False, soft_wrap=True)
        self._file: IO[str] | None = None
        self._live: Live | None = None

    def say(self, text: str) -> None:
        """One line for the person; above the live line when there is one."""
        if self._main:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._console.file.flush()

    def metrics(self, stage: str, step: int, values: Mapping[str, Any]) -> None:
        """Append one line {"stage", "step", ...}; on disk at once. Numbers may be tensors."""
        if not self._main or self.run_dir is None:
            return
        if self._file is None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (self.run_dir / METRICS_FILE).open("a", encoding="utf-8")
        record = {"stage": stage, "step": step, **{k: _plain(v) for k, v in values.items()}}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def rewind(self, stage: str, step: int) -> None:
        """Drop what is noted of `stage` after `step`, and a line that a kill cut in half.

        A resumed run notes those steps again, so that every step stands there once.
        """
        if not self._main or self.run_dir is None:
            return
        self.close()
        path = self.run_dir / METRICS_FILE
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if _is_kept(line, stage, step)]
        if kept != lines:
            write_whole(path, "".join(kept))

    @contextmanager
    def steps(self, stage: str, total: int, done: int = 0) -> Iterator[StepLine]:
        """The line of a training run of `total` steps, of which `done` are done."""
        with self._line(keep=True) as (draw, seconds):
            yield StepLine(stage, total, done, draw, seconds)

    @contextmanager
    def bar(self, label: str, total: int, unit: str = "", done: int = 0) -> Iterator[Bar]:
        """A progress bar for work that may take long: nothing is shown in the first two seconds.

        Args:
            done: of `total`, before this process.
        """
        with self._line(keep=False) as (draw, seconds):
            bar = Bar(label, total, unit, draw, seconds, done)
            yield bar
            bar.finish()

    @contextmanager
    def hearing(self, logger: str) -> Iterator[None]:
        """Say what a logger of that name, or below it, reports at INFO and above."""
        source, ear = logging.getLogger(logger), _Ear(self)
        before = source.level
        source.setLevel(logging.INFO)
        source.addHandler(ear)
        try:
            yield
        finally:
            source.removeHandler(ear)
            source.setLevel(before)

    def close(self) -> None:
        """Close the metrics file; a later `metrics` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextmanager
    def _line(self, keep: bool) -> Iterator[tuple[Any, float]]:
        """(function that shows a text, least seconds between two calls of it).

        Args:
            keep: the last text stays on the terminal.
        """
        if not self._main:
            yield (lambda text: None), math.inf
            return
        if not self._console.is_terminal or self._live is not None:
            yield self.say, _PLAIN_SECONDS
            return
        live = Live(Text(""), console=self._console, auto_refresh=False, transient=not keep)
        self._live = live
        try:
            with live:
                yield (lambda text: live.update(_one_line(text), refresh=True)), _LIVE_SECONDS
        finally:
            self._live = None


def _one_line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _plain(value: Any) -> Any:
    """A JSON value: tensors as numbers, NaN and infinity (which JSON lacks) as text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _is_kept(line: str, stage: str, step: int) -> bool:
    try:
        record = json.loads(line)
        return line.endswith("\n") and (record["stage"] != stage or record["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


class _Ear(logging.Handler):
    def __init__(self, log: RunLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log.say(record.getMessage())
