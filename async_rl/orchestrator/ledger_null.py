"""NullLedger: a ledger that keeps nothing, for measuring what keeping costs; a run with it can't be resumed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.orchestrator.records import Flight
from async_rl.types import Batch, Group, Outcome, Trajectory


class NullLedger:
    """Takes what a ledger takes and forgets it."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def note(self, values: Mapping[str, Any]) -> None:
        """Nothing to do."""

    def admit(self, flights: Sequence[Flight]) -> None:
        """Nothing to do."""

    def land(self, trajectories: Sequence[tuple[int, Trajectory]]) -> None:
        """Nothing to do."""

    def keep(self, groups: Sequence[Group]) -> None:
        """Nothing to do."""

    def end(self, endings: Sequence[tuple[int, Outcome, str]]) -> None:
        """Nothing to do."""

    def record_batch(self, batch: Batch) -> threading.Event:
        """Nothing to wait for."""
        written = threading.Event()
        written.set()
        return written

    def end_batch(self, batch: Batch, outcome: Outcome, reason: str) -> None:
        """Nothing to do."""

    def take_seconds(self) -> float:
        """No time spent."""
        return 0.0

    def run(self) -> None:
        """Nothing to write; returns after :meth:`stop`."""
        self._stopped.wait()

    def stop(self) -> None:
        """End :meth:`run`."""
        self._stopped.set()

    def close(self, timeout_s: float = 10.0) -> None:
        """Nothing to close."""
