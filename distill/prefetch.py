"""The next micro-batches, read and tokenised while the accelerator is busy with this one."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ltconvert.distill.data import Batch
from ltconvert.distill.objective import Stream

_AHEAD = 4  # micro-batches


class Prefetch:
    """A stream that works ahead in a thread; its position is that of the last batch given out.

    Errors of the stream are raised where its batch would have been given out.

    Args:
        pin: batches for a GPU, which would otherwise make the step wait for each copy.
    """

    def __init__(self, stream: Stream, *, pin: bool = False) -> None:
        self._stream = stream
        self._pin = pin
        self._state = stream.state_dict()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ltconvert-data")
        self._coming: deque[Future[tuple[Batch, dict[str, Any]]]] = deque()

    def __next__(self) -> Batch:
        while len(self._coming) < _AHEAD:
            self._coming.append(self._worker.submit(self._read))
        batch, self._state = self._coming.popleft().result()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch given out, whatever was read beyond it."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; what was read ahead is forgotten."""
        while self._coming:
            future = self._coming.popleft()
            if not future.cancel():
                future.exception()  # waits: the thread must not move the stream any more
        self._stream.load_state_dict(state)
        self._state = state

    def close(self) -> None:
        """Stop the thread."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _read(self) -> tuple[Batch, dict[str, Any]]:
        batch = next(self._stream)
        return batch.pinned() if self._pin else batch, self._stream.state_dict()
