"""OverlapClock: how much of the time generation and training ran at the same time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class OverlapClock:
    """Adds up training time and the engine-busy time that fell inside it (all calls from the main thread).

    Attributes:
        train_s: Seconds spent in training steps.
        both_s: Seconds of these during which an engine was generating.
    """

    train_s: float = 0.0
    both_s: float = 0.0
    _started_s: float = 0.0
    _busy_at_start_s: float = 0.0

    def step_started(self, now_s: float, busy_s: float) -> None:
        """A training step begins; ``busy_s`` is the engine's busy time so far."""
        self._started_s, self._busy_at_start_s = now_s, busy_s

    def step_ended(self, now_s: float, busy_s: float) -> None:
        """The step ended."""
        self.train_s += now_s - self._started_s
        self.both_s += busy_s - self._busy_at_start_s

    def overlap(self, generation_s: float) -> float:
        """Share in [0, 1] of the smaller of generation and training time that ran while the other did too."""
        smaller = min(self.train_s, generation_s)
        return min(self.both_s / smaller, 1.0) if smaller > 0 else 0.0
