"""A folder belongs to one call at a time: across processes, threads, kills and nested calls."""

from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from lock_case import holder

from ltconvert.distill.run_lock import LOCK_FILE, working_in
from ltconvert.errors import UserError


def test_a_second_process_is_told_who_is_at_work_and_a_killed_one_leaves_no_lock(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with holder(folder) as process:
        with pytest.raises(UserError) as error, working_in(folder):
            pass
        line = str(error.value)
        assert str(folder) in line and f"process {process.pid} " in line and "--out" in line
        assert "\n" not in line
        assert [path.name for path in folder.iterdir()] == [LOCK_FILE]
        process.send_signal(signal.SIGKILL)
        process.wait()
        with working_in(folder):
            assert str(os.getpid()) in (folder / LOCK_FILE).read_text()
    assert list(folder.iterdir()) == []


def test_the_holder_may_enter_again_and_another_thread_may_not(tmp_path: Path) -> None:
    folder, refused = tmp_path / "run", []

    def enter() -> None:
        try:
            with working_in(folder):
                pass
        except UserError as error:
            refused.append(error)

    with working_in(folder):
        with working_in(folder / "." / "inner" / ".."):  # another spelling
            pass
        assert (folder / LOCK_FILE).exists()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        assert len(refused) == 1
    enter()
    assert len(refused) == 1


def test_an_empty_folder_goes_again_with_those_above_it_and_a_filled_one_stays(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "runs" / "one"
    with pytest.raises(KeyError), working_in(folder):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with working_in(folder):
        (folder / "run.json").write_text("{}")
    assert [path.name for path in folder.iterdir()] == ["run.json"]
    (tmp_path / "empty").mkdir()
    with working_in(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()  # it was there before


def test_only_the_first_of_several_processes_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with holder(tmp_path / "run"):
        monkeypatch.setenv("RANK", "1")
        with working_in(tmp_path / "run"):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(UserError), working_in(tmp_path / "run"):
            pass


def test_a_folder_that_may_only_be_read_is_not_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write anyway
    with working_in(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_forked_process_leaves_the_lock_alone(tmp_path: Path) -> None:
    parent = os.getpid()
    with suppress(SystemExit), working_in(tmp_path):
        if not os.fork():
            raise SystemExit  # out of the block, as `sys.exit` in a worker would
        os.wait()
        assert (tmp_path / LOCK_FILE).exists()
    if os.getpid() != parent:
        os._exit(0)
    assert list(tmp_path.iterdir()) == []


def test_what_the_disk_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    line = pytest.raises(UserError, match=r"cannot write to .*Not a directory")
    with line, working_in(tmp_path / "file" / "run"):
        pass
    write = Path.write_text

    def full(self: Path, *given: Any, **more: Any) -> int:
        if self.name == LOCK_FILE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *given, **more)

    monkeypatch.setattr(Path, "write_text", full)
    with working_in(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def acquire(self: FileLock) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(FileLock, "acquire", acquire)
    with pytest.warns(UserWarning, match="no locks"), working_in(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists()
