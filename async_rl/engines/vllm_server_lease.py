"""ServerLease: which run has a server; one that gives no sign of life loses it to the next that asks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

LEASE_S = 20.0
"""How long a run may give no sign of life before another one may have its server.

A run asks its server twice a second. What keeps it from that for seconds (a big pickle that holds the interpreter's
lock, swapping) must not cost it the server. And a run takes a silent server for dead after as long
(``ANSWER_TIMEOUT_S``): when the lease has run out over a broken network, the run has given the server up, too.
"""

RUN_HEADER = "X-Async-RL-Run"
"""Header with the id under which a run claimed the server; each request with it is a sign of life."""


class NotHeldError(RuntimeError):
    """Another run, or none, has the server; says which."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a run that asks for a server.

    Attributes:
        granted: It has the server now.
        holder: Which run has it, for people.
        renewals: How often a holder asked the server how it is, ever. A run has one such question under way at most, so
            two more are those of a living run; one may be left of a killed one.
        silent_s: Seconds since the last one.
    """

    granted: bool
    holder: str
    renewals: int
    silent_s: float


class ServerLease:
    """Gives a server to one run at a time. No I/O; called from one thread.

    A run has the server from a granted claim until it releases it, or until another one claims it after ``LEASE_S``
    without a sign of life. While one of its calls is carried out, the lease does not run out: a load that a killed run
    left behind must not end after the next run's.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._run = ""
        self._who = ""
        self._released = True
        self._renewed_s = 0.0
        self._renewals = 0
        self._calls = 0

    @property
    def holder(self) -> str:
        """Which run has the server, for people; empty where none has."""
        return "" if self._released else self._who

    def claim(self, run: str, who: str) -> Claim:
        """Give the server to ``run`` if it is free, or if it has it already.

        Args:
            run: Its id, which only it knows.
            who: What others are told about it.

        Raises:
            ValueError: no id.
        """
        if not run:
            raise ValueError(f"a claim needs the header {RUN_HEADER}")
        now_s = self._clock()
        lapsed = self._released or now_s - self._renewed_s >= LEASE_S
        if granted := run == self._run or (lapsed and not self._calls):
            self._run, self._who, self._released = run, who, False
            self._renewed_s = now_s
        return Claim(granted, self._who, self._renewals, now_s - self._renewed_s)

    def renew(self, run: str) -> bool:
        """Take the question of a run how the server is; says whether the run has it."""
        held = self._held_by(run)
        self._renewals += held
        return held

    @contextlib.contextmanager
    def call(self, run: str) -> Iterator[None]:
        """Around a call that changes the server.

        Raises:
            NotHeldError: ``run`` does not have it.
        """
        if not self._held_by(run):
            holder = self.holder
            raise NotHeldError(f"it is in use by another run ({holder})" if holder else "no run has claimed it")
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1

    def release(self, run: str) -> None:
        """Give the server back, if ``run`` has it."""
        if run == self._run:
            self._released = True

    def _held_by(self, run: str) -> bool:
        held = not self._released and run == self._run
        if held:
            self._renewed_s = self._clock()
        return held
