"""The text of progress lines: a training run's steps, a bar for other work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import psutil
import torch

_SHOW_AFTER_SECONDS = 2.0
_BAR_CELLS = 24
# The first steps after a start set up caches and kernels: they say nothing about the rest.
_WARM_UP_STEPS = 2
_NOT_PARTS = ("loss", "lr", "grad_norm", "tokens")


class StepLine:
    """`logits 40/500 | loss 1.9 (kl 1.6 ce 0.3) | lr 3.0e-05 | 41.2k tok/s | 23.1 GiB | eta 6m`."""

    def __init__(
        self, stage: str, total: int, done: int, draw: Callable[[str], None], every_seconds: float
    ) -> None:
        self._stage, self._total, self._begin = stage, total, done
        self._draw, self._every = draw, every_seconds
        self._shown = float("-inf")
        self._clock: tuple[int, float] | None = None  # where the speed is measured from

    def step(self, step: int, values: Mapping[str, float], tokens_per_step: int) -> None:
        """Show step number `step` (of `total`), unless the last showing was a moment ago.

        Args:
            values: "loss", its parts, "lr"; other names are parts of the loss as well.
        """
        now = time.monotonic()
        if self._clock is None or step <= self._begin + _WARM_UP_STEPS:
            self._clock = step, now
        if now - self._shown < self._every and step < self._total:
            return
        self._shown = now
        self._draw(self._text(step, values, tokens_per_step, now))

    def _text(
        self, step: int, values: Mapping[str, float], tokens_per_step: int, now: float
    ) -> str:
        parts = [f"{self._stage} {step}/{self._total}", describe_loss(values)]
        if "lr" in values:
            parts.append(f"lr {values['lr']:.1e}")
        assert self._clock is not None
        steps, seconds = step - self._clock[0], now - self._clock[1]
        if steps > 0 and seconds > 0:
            parts.append(f"{short_number(steps * tokens_per_step / seconds)} tok/s")
        parts.append(f"{memory_gib():.1f} GiB")
        if steps > 0:
            parts.append(f"eta {short_time((self._total - step) * seconds / steps)}")
        return " | ".join(parts)


class Bar:
    """A bar with a count and the time left."""

    def __init__(
        self,
        label: str,
        total: int,
        unit: str,
        draw: Callable[[str], None],
        every_seconds: float,
        done: int = 0,
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._draw, self._every = draw, every_seconds
        self._begun = time.monotonic()
        self._shown: float | None = None
        self._before = self.done = done

    def advance(self, count: int = 1) -> None:
        """So much more is done."""
        self.done += count
        now = time.monotonic()
        ready = self._shown is None and now - self._begun >= _SHOW_AFTER_SECONDS
        if ready or (self._shown is not None and now - self._shown >= self._every):
            self._shown = now
            self._draw(self._text(now - self._begun))

    def finish(self) -> None:
        """Show the end, if anything was shown at all."""
        if self._shown is not None:
            self._draw(self._text(time.monotonic() - self._begun))

    def _text(self, seconds: float) -> str:
        share = min(1.0, self.done / max(self._total, 1))
        cells = round(share * _BAR_CELLS)
        bar = "#" * cells + "-" * (_BAR_CELLS - cells)
        count = f"{self.done}/{self._total} {self._unit}".rstrip()
        now, left = self.done - self._before, ""  # what an earlier process did says no speed
        if now > 0 and self.done < self._total:
            left = f" | eta {short_time(seconds * (self._total - self.done) / now)}"
        return f"{self._label} [{bar}] {count}{left}"


def describe_loss(values: Mapping[str, float]) -> str:
    """`loss 1.934 (kl 1.61 ce 0.32)`."""
    extra = [f"{name} {value:.3g}" for name, value in values.items() if name not in _NOT_PARTS]
    return f"loss {values['loss']:.4g}" + (f" ({' '.join(extra)})" if extra else "")


def memory_gib() -> float:
    """Memory in use: the GPU's largest so far, else this process's at the moment, in GiB."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return psutil.Process().memory_info().rss / 2**30


def short_number(value: float) -> str:
    """41234 -> `41.2k`."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.0f}"


def short_time(seconds: float) -> str:
    """400 -> `6m40s`; the two largest units."""
    whole = max(0, round(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"
