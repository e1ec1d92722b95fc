"""One call at a time works in a folder; a second one is told so at once."""

from __future__ import annotations

import errno
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ltconvert.distill.processes import is_main_process
from ltconvert.distill.records import clear_disk_errors
from ltconvert.errors import UserError

LOCK_FILE = ".lock"
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # of file systems that have none


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Keep a folder to oneself while the body runs; it is made if need be, and goes if left empty.

    What the disk refuses meanwhile is one line, see ``clear_disk_errors``.

    The operating system holds the lock, so that a killed process leaves none. Of several processes
    of one run the first locks. Whoever holds the folder may enter again, in the same thread. A
    folder that may only be read is not locked: nothing here can write to it.

    Raises:
        UserError: another call is at work in the folder, or the disk refuses.
    """
    with clear_disk_errors(folder), _locked(folder):
        yield


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if not is_main_process() or (folder.is_dir() and not os.access(folder, os.W_OK)):
        yield
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # One object a path and process, which counts: else a second one would lock out the first.
    lock = FileLock(folder / LOCK_FILE, blocking=False, is_singleton=True, fallback_to_soft=False)
    locked = _acquire(lock, folder)
    try:
        yield
    finally:
        # Not in an inner call, nor in a forked process, where the count is 0: it holds nothing.
        if not locked or lock.lock_counter == 1:
            with suppress(OSError):  # the first folder that is not empty ends it
                (folder / LOCK_FILE).unlink(missing_ok=True)
                for path in made:
                    path.rmdir()
        if locked:
            lock.release()


def _acquire(lock: FileLock, folder: Path) -> bool:
    """Lock, and note for others who holds it; False where the file system cannot."""
    path = folder / LOCK_FILE
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{folder}: another call of ltconvert is at work in it{_holder(path)}; wait until it "
            "has ended, or choose another output folder (--out)"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{folder}: its file system has no locks; start no second call in it", stacklevel=4
        )
        return False
    with suppress(OSError):  # a full disk; it is for a message alone
        path.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
    return True


def _holder(path: Path) -> str:
    """Who holds the lock, in brackets, where that can be read."""
    try:
        return f" ({path.read_text(encoding='utf-8') or 'just begun'})"
    except OSError:
        return ""
