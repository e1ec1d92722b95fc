"""One line of the benchmark's table, what it has to reach, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

GIB = 2**30
HEAD = (
    "op", "shape", "phase", "ours ms", "GiB", "floor ms", "peers: ms (ours/peer)", "first s",
    "parity", "target",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What a row has to reach; every part that is given.

    Attributes:
        peer: name of the peer whose time ``ratio`` is a share of.
        floor_share: floor over ours, at least.
        peak_gib: memory that a call may add to its inputs, results and gradients included.
    """

    peer: str | None = None
    ratio: float = 1.0
    floor_share: float | None = None
    peak_gib: float | None = None


@dataclass
class PeerTime:
    """A peer's time in milliseconds, or why there is none."""

    ms: float | None = None
    peak_gib: float | None = None
    note: str = ""


@dataclass
class Row:
    """One op, shape and phase.

    Attributes:
        failed: why nothing was measured; a row that failed fails the run.
        parity_red: verdicts that are not ok; such a row shows no speed.
        first_s: seconds that the process's first call of this shape took, compiling included.
    """

    op: str
    shape: str
    phase: str
    backend: str = ""
    ms: float | None = None
    peak_gib: float | None = None
    floor_ms: float | None = None
    floor: str = ""
    peers: dict[str, PeerTime] = field(default_factory=dict)
    first_s: float | None = None
    parity: str = ""
    parity_red: bool = False
    failed: str = ""
    target: Target | None = None

    @property
    def bad(self) -> bool:
        """Whether the run may not end well because of this row."""
        return self.parity_red or bool(self.failed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a red row carries no time."""
        values = asdict(self)
        if self.bad:
            values |= {"ms": None, "peak_gib": None, "floor_ms": None, "peers": {}}
        return values | {"verdict": verdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Row:
        """The inverse of ``to_dict``."""
        values = {name: value for name, value in values.items() if name != "verdict"}
        values["peers"] = {name: PeerTime(**peer) for name, peer in values["peers"].items()}
        if values["target"] is not None:
            values["target"] = Target(**values["target"])
        return cls(**values)


def verdict(row: Row) -> str:
    """``met``, ``missed`` or why it cannot be said, with the target itself."""
    target = row.target
    if target is None or row.bad or row.ms is None:
        return ""
    parts: list[tuple[str, bool | None]] = []
    if target.peer is not None:
        peer = row.peers.get(target.peer)
        met = None if peer is None or peer.ms is None else row.ms <= target.ratio * peer.ms
        parts.append((f"<= {target.ratio:g} x {target.peer}", met))
    if target.floor_share is not None:
        met = None if row.floor_ms is None else row.floor_ms >= target.floor_share * row.ms
        parts.append((f">= {target.floor_share:.0%} of {row.floor or 'floor'}", met))
    if target.peak_gib is not None:
        met = None if row.peak_gib is None else row.peak_gib <= target.peak_gib
        parts.append((f"<= {target.peak_gib:g} GiB", met))
    words = {True: "met", False: "missed", None: "no figure"}
    return ", ".join(f"{text}: {words[met]}" for text, met in parts)


def render(rows: Sequence[Row]) -> str:
    """A Markdown table, columns padded so that a terminal shows it as one."""
    lines = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def brief(row: Row) -> str:
    """The row as one progress line."""
    return " | ".join(cell for cell in _cells(row) if cell)


def _cells(row: Row) -> tuple[str, ...]:
    start = (row.op, row.shape, row.phase)
    if row.parity_red:
        return (*start, *[""] * 5, f"PARITY RED: {row.parity}", "")
    if row.failed:
        return (*start, "none", *[""] * 5, f"failed: {row.failed}")
    name = f" {row.backend}" if row.backend not in ("", "triton") else ""
    return (
        *start,
        f"{_number(row.ms)}{name}",
        _number(row.peak_gib),
        _floor(row),
        "; ".join(_peer(row, name, peer) for name, peer in row.peers.items()),
        _number(row.first_s),
        row.parity,
        verdict(row),
    )


def _floor(row: Row) -> str:
    if row.floor_ms is None or not row.ms:
        return ""
    return f"{_number(row.floor_ms)} {row.floor} ({row.floor_ms / row.ms:.0%})"


def _peer(row: Row, name: str, peer: PeerTime) -> str:
    if peer.ms is None:
        return f"{name}: {peer.note or 'not measured'}"
    ratio = "" if row.ms is None else f" ({row.ms / peer.ms:.2f} x)"
    memory = "" if peer.peak_gib is None else f" {_number(peer.peak_gib)} GiB"
    note = f" [{peer.note}]" if peer.note else ""
    return f"{name} {_number(peer.ms)}{ratio}{memory}{note}"


def _number(value: float | None) -> str:
    """Three digits, as far as they matter."""
    if value is None:
        return ""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
