"""Ctrl-C, SIGTERM or the end of its time in training: finish the step, keep the work, then stop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Stopped(KeyboardInterrupt):
    """Training stopped on a signal, after its checkpoint; the message says how to go on.

    The command line prints it and exits with status 130.
    """


class OutOfTime(Stopped):
    """Training stopped at the end of the time that it was given, after its checkpoint."""


@contextmanager
def saying_what_is_kept(stage: str, folder: Path) -> Iterator[None]:
    """Give an interruption outside of training, which comes without a message, one of its own."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if str(interrupt):
            raise
        raise Stopped(
            f"stopped in stage {stage}; what it has computed is in {folder}; the same command goes "
            "on from there"
        ) from None


class StopRequest:
    """Whether a signal has come, or the time is up.

    Args:
        limit_s: seconds from now on; None: as long as it takes.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.signal: signal.Signals | None = None
        self._end = math.inf if limit_s is None else time.monotonic() + limit_s

    def __bool__(self) -> bool:
        return self.signal is not None or time.monotonic() >= self._end

    def error(self, message: str) -> Stopped:
        """What to raise once training has stopped."""
        timed = self.signal is None and self._end < math.inf
        return OutOfTime(message) if timed else Stopped(message)


@contextmanager
def stop_requests(limit_s: float | None = None) -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM instead of acting on it; a second one acts at once."""
    request = StopRequest(limit_s)
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers
        return
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        for each, handler in former.items():
            signal.signal(each, handler)

    for number in former:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
