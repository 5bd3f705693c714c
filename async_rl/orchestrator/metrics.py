"""Meters and MetricsLoop: what happened since the last step, counted where it happens, read on an own clock."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from async_rl.orchestrator.records import Landing
from async_rl.types import Group

if TYPE_CHECKING:
    from async_rl.orchestrator.supervisor import Supervisor

_MOST_GROUPS = 8192  # finished groups remembered between two readings; beyond that the oldest are not described


class Meters:
    """Counters and timings that any thread may add to; appending is atomic, so the hot path needs no lock here."""

    def __init__(self) -> None:
        self.groups: deque[Group] = deque(maxlen=_MOST_GROUPS)
        self.timings: deque[tuple[str, float]] = deque()
        self.counts: deque[tuple[str, int]] = deque()

    def landed(self, groups: Sequence[Group], landing: Landing, *, kept: int, failed: int) -> None:
        """Count one landing."""
        self.groups.extend(groups)
        count = self.counts.append
        if kept:
            count(("rollout/groups_kept", kept))
        if filtered := len(groups) - kept:
            count(("rollout/groups_filtered", filtered))
        if failed:
            count(("rollout/groups_failed", failed))
        if landing.retries:
            count(("rollout/retries", landing.retries))
        if landing.cancelled:
            count(("rollout/stragglers_cancelled", landing.cancelled))

    def took(self, name: str, seconds: float) -> None:
        """Add seconds to the stage ``time/<name>_s``."""
        self.timings.append((f"time/{name}_s", seconds))


class MetricsLoop:
    """Reads the gauges every ``interval_s`` and condenses everything since the last :meth:`drain` into few numbers.

    Args:
        meters: What the other threads count.
        gauges: Reads the current numbers, and under ``"limited_by"`` the term that binds.
        interval_s: How often.
        supervisor: Says when to stop, and keeps the names of waits.
    """

    def __init__(
        self,
        meters: Meters,
        gauges: Callable[[], Mapping[str, float | str]],
        *,
        interval_s: float,
        supervisor: Supervisor,
    ) -> None:
        self._meters = meters
        self._gauges = gauges
        self._interval_s = interval_s
        self._supervisor = supervisor
        self._lock = threading.Lock()
        self._limits_s: defaultdict[str, float] = defaultdict(float)
        self._reset(time.monotonic())

    def _reset(self, now_s: float) -> None:
        self._since_s = self._sampled_s = now_s
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._samples = 0
        self._binding_s: defaultdict[str, float] = defaultdict(float)
        self._latencies: list[float] = []
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self._generated = 0
        self._truncated = 0

    def run(self) -> None:
        """The thread's body; returns when the supervisor says stop."""
        while not self._supervisor.stopping.is_set():
            with self._supervisor.waiting("the next reading of the gauges"):
                self._supervisor.stopping.wait(self._interval_s)
            self.sample()

    def sample(self) -> None:
        """Read the gauges once and take in what was counted."""
        gauges = self._gauges()
        with self._lock:
            now_s = time.monotonic()
            for name, value in gauges.items():
                if isinstance(value, (int, float)):
                    self._sums[name] += value
            self._samples += 1
            limit = str(gauges["limited_by"])
            self._binding_s[limit] += now_s - self._sampled_s
            self._limits_s[limit] += now_s - self._sampled_s
            self._sampled_s = now_s
            for group in _taken(self._meters.groups):
                for t in group.trajectories:
                    self._latencies.append(t.ended_s - t.started_s)
                    self._lengths.append(len(t.token_ids))
                    self._rewards.append(t.reward)
                    self._generated += t.trainable_tokens
                    self._truncated += t.finish_reason == "length"

    def drain(self) -> dict[str, float]:
        """What happened since the last drain.

        Returns:
            ``queue/*``: mean of each gauge; ``limit/*``: share of the time each term bound admission; ``rollout/*``:
            finished rollouts (count, latency in seconds, length in tokens, reward) and group outcomes; ``time/*_s``:
            seconds spent in each stage.
        """
        self.sample()
        with self._lock:
            now_s = time.monotonic()
            seconds = max(now_s - self._since_s, 1e-9)
            metrics: dict[str, float] = {f"queue/{name}": total / self._samples for name, total in self._sums.items()}
            for limit, bound_s in self._binding_s.items():
                metrics[f"limit/{limit}"] = bound_s / seconds
            for name, value in _taken(self._meters.timings):
                metrics[name] = metrics.get(name, 0.0) + value
            for name, count in _taken(self._meters.counts):
                metrics[name] = metrics.get(name, 0.0) + count
            if self._latencies:
                latency = np.asarray(self._latencies)
                metrics |= {
                    "rollout/finished": float(len(latency)),
                    "rollout/per_s": len(latency) / seconds,
                    "rollout/latency_mean_s": float(latency.mean()),
                    "rollout/latency_p99_s": float(np.quantile(latency, 0.99)),
                    "rollout/latency_max_s": float(latency.max()),
                    "rollout/length_mean": float(np.mean(self._lengths)),
                    "rollout/trainable_tokens": float(self._generated),
                    "rollout/truncated_share": self._truncated / len(latency),
                    "rollout/reward_mean": float(np.mean(self._rewards)),
                }
            self._reset(now_s)
        return metrics

    def limits(self) -> str:
        """What bound admission over the whole run, most of the time first: ``"ahead 61 %, concurrency 39 %"``."""
        with self._lock:
            total = max(sum(self._limits_s.values()), 1e-9)
            shares = sorted(((s / total, limit) for limit, s in self._limits_s.items()), reverse=True)
        return ", ".join(f"{limit} {share:.0%}" for share, limit in shares if share >= 0.005)


def _taken(queue: deque) -> list:  # type: ignore[type-arg]
    items = []
    while queue:
        items.append(queue.popleft())
    return items
