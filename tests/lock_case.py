"""What may happen to a run from outside: another process in its folder, another text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD = """
import sys
from pathlib import Path
from ltconvert.distill.run_lock import working_in
with working_in(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process at work in the folder."""
    call = [sys.executable, "-P", "-c", HOLD, str(folder)]
    with subprocess.Popen(
        call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def changed(text: Path) -> Iterator[None]:
    """A text of as many bytes in the place of a file of the toy language."""
    before = text.read_text()
    text.write_text(before.replace("cat", "cow"))
    try:
        yield
    finally:
        text.write_text(before)
