"""Ctrl-C and SIGTERM during training: finish the step, keep the work, then stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """Training stopped on a signal, after its checkpoint; the message says how to go on.

    The command line prints it and exits with status 130.
    """


class StopRequest:
    """Whether a signal has come."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Note the first SIGINT or SIGTERM instead of acting on it; a second one acts at once."""
    request = StopRequest()
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
