"""RunLock: one process at a time writes to a run directory; the lock dies with its process, however that ends."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
from pathlib import Path
from types import TracebackType

from async_rl.types import SettingError

log = logging.getLogger(__name__)

LOCK = ".lock"
"""The locked file in a run directory; it names the process that has it, or had it last, and outlives the run."""

_held: set[int] = set()


class RunLock:
    """A run directory that is this process's alone, from the construction until :meth:`release` or its death.

    Children do not inherit it: neither those that execute another program nor those that are only forked keep a
    directory from being used when this process is dead.

    Args:
        directory: The run directory; made if it is missing.

    Raises:
        SettingError: another process, or another fit of this one, has it; names that process.
        OSError: the directory or the file in it can't be made.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / LOCK
        self._descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise SettingError(
                f"run_dir={directory} is in use by {_holder(file)}: wait for its end, stop it, or give another run_dir"
            ) from error
        except OSError as error:
            log.warning("%s can't be locked (%s): nothing keeps two runs apart there", file, error.strerror)
        if not _is_still(self._descriptor, file):  # who had it was refused, and took it away
            os.close(self._descriptor)
            raise SettingError(f"run_dir={directory} was in use a moment ago: start again, or give another run_dir")
        self._file = file
        _held.add(self._descriptor)
        with contextlib.suppress(OSError):  # a full disk: the name is for people, the lock holds without it
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()} on {platform.node()}\n".encode(), 0)

    def remove(self) -> None:
        """Take the file away and let others have the directory: for one that shall be as it was before."""
        self._file.unlink(missing_ok=True)
        self.release()

    def release(self) -> None:
        """Let others have the directory. Idempotent."""
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def _is_still(descriptor: int, file: Path) -> bool:
    """Whether the file that is open is the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError:
        return False


def _holder(file: Path) -> str:
    with contextlib.suppress(OSError):
        if name := file.read_text(encoding="utf-8").strip():
            return f"process {name}"
    return "another process"  # which has not written its name yet


def _let_go_in_child() -> None:
    # A lock lives as long as a copy of its descriptor is open anywhere.
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go_in_child)
