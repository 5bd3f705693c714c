"""StallWatchdog: a run in which nothing happens for too long is described and ended."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from async_rl.types import RunError

if TYPE_CHECKING:
    from async_rl.orchestrator.room import Room
    from async_rl.orchestrator.supervisor import Supervisor

log = logging.getLogger(__name__)

_LOCK_S = 2.0


class StallError(RunError):
    """No batch was trained, no rollout ended and no newer weights were loaded for ``stall_timeout_s``."""


class StallClock:
    """Counts the seconds without progress.

    A look counts a few times the usual distance of two looks at most: a process that was stopped or starved for an
    hour did not stall in it.

    Args:
        timeout_s: Seconds without progress that are a stall, ``> 0``.
        now_s: Now, on any clock.
    """

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self.timeout_s = timeout_s
        self.look_every_s = min(1.0, timeout_s / 10)
        self.idle_s = 0.0
        self.last = "the start"
        self._looked_s = now_s
        self._events = 0
        self._seen = 0

    def note(self, what: str) -> None:
        """There was progress; from any thread."""
        self.last = what
        self._events += 1

    def stalled(self, now_s: float) -> bool:
        """Whether there was no progress for too long; to be asked every ``look_every_s``."""
        if self._events != self._seen:
            self._seen, self.idle_s = self._events, 0.0
        else:
            self.idle_s += min(now_s - self._looked_s, 4 * self.look_every_s)
        self._looked_s = now_s
        return self.idle_s >= self.timeout_s


class StallWatchdog:
    """Looks at the clock; at a stall it reports who waits for what, and fails the run.

    Args:
        room: The lock, which somebody may hold for ever.
        timeout_s: Seconds without progress that are a stall; ``None``: any number.
        numbers: The gauges, read under the lock.
        stacks: Describes where every thread is.
        on_stall: Takes the report, and sees to it that the process ends even if the main thread does not come.
        supervisor: Knows who waits for what, takes the failure, says when to stop.
    """

    def __init__(
        self,
        room: Room,
        *,
        timeout_s: float | None,
        numbers: Callable[[], Mapping[str, float | str]],
        stacks: Callable[[], str],
        on_stall: Callable[[str], None],
        supervisor: Supervisor,
    ) -> None:
        self._clock = StallClock(math.inf if timeout_s is None else timeout_s, time.monotonic())
        self._room = room
        self._numbers = numbers
        self._stacks = stacks
        self._on_stall = on_stall
        self._supervisor = supervisor

    def note(self, what: str) -> None:
        """Progress, for example ``"a rollout ended"``; from any thread."""
        self._clock.note(what)

    def run(self) -> None:
        """The thread's body; returns when the supervisor says stop, or after a stall."""
        while not self._supervisor.stopping.wait(self._clock.look_every_s):
            if self._clock.stalled(time.monotonic()):
                break
        else:
            return
        headline = (
            f"no batch was trained, no rollout ended and no newer weights were loaded for {self._clock.idle_s:.4g} s "
            f"(stall_timeout_s={self._clock.timeout_s:g}); the last that happened: {self._clock.last}"
        )
        report = self._report(headline)
        error = StallError(headline)
        # In a thread of its own, for it needs the lock to wake the others.
        threading.Thread(target=self._supervisor.fail, args=(error,), name="stall-failure", daemon=True).start()
        self._on_stall(report)
        log.error("%s", report)

    def _report(self, headline: str) -> str:
        waits = [f"{name}: waits for {what}" for name, what in sorted(self._supervisor.waits().items())]
        if self._room.lock.acquire(timeout=_LOCK_S):
            try:
                numbers = [f"{name}: {value}" for name, value in self._numbers().items()]
            finally:
                self._room.lock.release()
        else:
            numbers = [f"not known: somebody held the lock of the control plane for {_LOCK_S:g} s"]
        return "\n".join(
            [f"stall: {headline}", "--- who waits for what", *waits, "--- numbers", *numbers, self._stacks()]
        )
