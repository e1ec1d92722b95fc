"""Tables of the report as plain text cells; terminal, Markdown and HTML draw the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

NOT_RUN = "not run"


@dataclass
class Table:
    """Cells as text. The first column names the row, the others are right-aligned."""

    headers: Sequence[str]
    rows: list[list[str]]
    caption: str = ""


@dataclass
class Plot:
    """A PNG picture with a file name (without ending) and a text for those who cannot see it."""

    name: str
    png: bytes
    alt: str


@dataclass
class Section:
    """A part of the report; without content it says that it was not run."""

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    code: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """There is nothing to show."""
        return not (self.text or self.tables or self.plots or self.code)


def number(value: float | None, stderr: float | None = None, digits: int = 3) -> str:
    """``0.123 ± 0.004``; a dash where there is no value, ``nan`` of a model that makes none."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    return _fixed(value, digits) + _error(stderr, digits)


def percent(value: float | None, stderr: float | None = None) -> str:
    """``87.5 % ± 1.2``; a dash where there is no value."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    return f"{_fixed(100 * value, 1)} %" + _error(None if stderr is None else 100 * stderr, 1)


def _error(stderr: float | None, digits: int) -> str:
    if stderr is None or not math.isfinite(stderr):
        return ""
    return f" ± {_fixed(stderr, digits)}"


def _fixed(value: float, digits: int) -> str:
    """A perplexity of a student that has lost all it knew may have hundreds of digits."""
    return f"{value:z.{digits}f}" if abs(value) < 1e9 else f"{value:.3g}"


def count(value: float | None) -> str:
    """``12,345``."""
    return "-" if value is None else f"{value:,.0f}"


def size(value: float) -> str:
    """Bytes as ``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def runs(numbers: Sequence[int]) -> str:
    """``0, 4-6, 9``."""
    parts: list[list[int]] = []
    for value in sorted(numbers):
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(f"{p[0]}" if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "none"
