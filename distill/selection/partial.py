"""Partial scores on disk, so that a killed selection goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ltconvert.distill.data import as_recorded
from ltconvert.distill.processes import is_main_process
from ltconvert.distill.records import write_json


def in_words_of(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What a selection depends on as an earlier call would have noted it, see ``as_recorded``."""
    return {**now, "data": as_recorded(now["data"], then.get("data"))} if "data" in now else {**now}


class Progress:
    """A dict of partial results that survives the process.

    Python writes floats so that they read back the same: a resumed sum is the undisturbed sum.

    Args:
        path: the file; None keeps everything in memory.
        fingerprint: what the partial results depend on; a file with another one is ignored.
    """

    def __init__(self, path: Path | None, fingerprint: dict[str, Any]) -> None:
        self.path = path
        # As JSON gives it back: tuples become lists.
        self.fingerprint = json.loads(json.dumps(fingerprint))
        self.state: dict[str, Any] = {}
        if path is not None and path.exists():
            self.state = self._read(path)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            saved = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            return {}
        then = saved.get("fingerprint", {})
        return saved["state"] if then == in_words_of(then, self.fingerprint) else {}

    def save(self, state: dict[str, Any]) -> None:
        """Replace the partial results."""
        self.state = state
        if self.path is not None and is_main_process():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {"fingerprint": self.fingerprint, "state": state})

    def clear(self) -> None:
        """Forget them: the selection itself is written."""
        self.state = {}
        if self.path is not None and is_main_process():
            self.path.unlink(missing_ok=True)
