"""Printing for the command line: one JSON document, or tables for people.

On a terminal tables are drawn by rich; elsewhere they keep the same text without colour, wide
enough that no column is cut.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

PLAIN_WIDTH = 160


def print_json(document: Any) -> None:
    """One JSON document on stdout; paths, dtypes and the like become text."""
    print(json.dumps(document, indent=2, default=str))


def print_line(text: str = "") -> None:
    """One line of text, as it is."""
    print(text, flush=True)


def print_note(text: str) -> None:
    """A line beside the result, on stderr, so that stdout holds the result alone."""
    print(text, file=sys.stderr, flush=True)


def print_facts(title: str, facts: Mapping[str, Any]) -> None:
    """A title and one `name  value` line a fact."""
    print_line(title)
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        print_line(f"  {name:<{width}}  {value}")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table; columns whose every cell is a number are right-aligned."""
    from rich import box
    from rich.table import Table

    cells = [[_cell(value) for value in row] for row in rows]
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(_is_number(row[index]) for row in cells) and bool(cells)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    print_rich(table)


def print_rich(shown: RenderableType) -> None:
    """Whatever rich can draw; plain lines where stdout is no terminal."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(markup=False, highlight=False).print(shown)
        return
    console = Console(width=PLAIN_WIDTH, markup=False, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(shown)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    print_line("\n".join(lines).strip("\n"))


def human_count(count: float) -> str:
    """A count as 950, 40.9 K, 134.5 M or 1.43 B."""
    for limit, divisor, unit in (
        (1e3, 1, ""),
        (1e6, 1e3, " K"),
        (1e9, 1e6, " M"),
        (1e12, 1e9, " B"),
    ):
        if abs(count) < limit:
            return f"{count / divisor:.4g}{unit}"
    return f"{count / 1e12:.4g} T"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _is_number(text: str) -> bool:
    try:
        float(text.removesuffix("%"))
    except ValueError:
        return text == "-"
    return True
