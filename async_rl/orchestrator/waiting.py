"""MainThread: how the main thread waits for the others - polling, in slices, and never past a failure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_rl.orchestrator.room import Room
    from async_rl.orchestrator.supervisor import Supervisor

Poll = Callable[[], None]

_POLL_S = 0.1


class MainThread:
    """Blocks the main thread until something is so.

    Args:
        room: The lock and its conditions.
        supervisor: Keeps the first failure, and the names of waits.

    Attributes:
        waits_for: What it waits for now, for people; ``""`` while it does not.
    """

    def __init__(self, room: Room, supervisor: Supervisor) -> None:
        self._room = room
        self._supervisor = supervisor
        self.waits_for = ""

    def wait(self, what: str, ready: Callable[[], bool], poll: Poll, timeout_s: float = float("inf")) -> None:
        """Block until ``ready()``, asked under the lock, or the time is up; raises the first failure of any thread.

        ``poll`` is called at least ten times a second, outside every lock; what it raises ends the wait.
        """
        deadline_s = time.monotonic() + timeout_s
        self.waits_for = what
        try:
            with self._supervisor.waiting(what):
                while True:
                    poll()
                    self._supervisor.check()
                    with self._room.lock:
                        if ready() or time.monotonic() >= deadline_s:
                            return
                        self._room.batch.wait(_POLL_S)
        finally:
            self.waits_for = ""

    def wait_written(self, written: Callable[[float], bool]) -> None:
        """Block until ``written(timeout_s)`` says that something is on the disk; raises the first failure."""
        with self._supervisor.waiting("the batch to be on the disk"):
            while not written(_POLL_S):
                self._supervisor.check()
