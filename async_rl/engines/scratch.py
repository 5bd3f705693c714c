"""Scratch: a directory for an engine's sockets and rendezvous files that does not outlive its process for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_PREFIX = "async-rl-engine-"
_OWNER = "owner"


class Scratch:
    """Removed by :meth:`cleanup`, at the latest when the process exits; after a SIGKILL by the next one that is made.

    Its owner holds a lock on a file in it, which the kernel gives back however a process ends: unlike a process id that
    holds between containers which share the system's temporary directory.

    Attributes:
        name: The directory; a short path, as sockets need it.
    """

    def __init__(self) -> None:
        sweep()
        self.name = tempfile.mkdtemp(prefix=_PREFIX)
        aside, owner = (os.path.join(self.name, name) for name in ("starting", _OWNER))
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.rename(aside, owner)  # nobody sees it unlocked
        self._remove = weakref.finalize(self, _remove, self.name, descriptor)

    def cleanup(self) -> None:
        """Remove it. Idempotent."""
        self._remove()


def sweep() -> None:
    """Remove what processes that are gone left."""
    for owner in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with contextlib.suppress(OSError):  # locked: its owner lives; or another user's; or gone meanwhile
            descriptor = os.open(owner, os.O_WRONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def _remove(directory: str, descriptor: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.close(descriptor)
