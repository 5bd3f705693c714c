"""Meters and MetricsLoop: what happened since the last step, counted where it happens, read on an own clock."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from async_rl.orchestrator.records import Flight, Landing
from async_rl.types import Group, Outcome, Trajectory

if TYPE_CHECKING:
    from async_rl.orchestrator.supervisor import Supervisor

_MOST_GROUPS = 8192  # finished groups remembered between two readings; beyond that the oldest are not described


@dataclass(slots=True)
class _Sums:
    """Groups with one outcome: how many, how long they took, how long their trajectories are."""

    groups: int = 0
    seconds: float = 0.0
    measured: int = 0  # groups with a finished trajectory
    tokens: float = 0.0

    def add(self, seconds: float, trajectories: Collection[Trajectory]) -> None:
        self.groups += 1
        self.seconds += seconds
        if trajectories:
            self.measured += 1
            self.tokens += sum(len(t.token_ids) for t in trajectories) / len(trajectories)


class Meters:
    """Counters and timings that any thread may add to; appending is atomic, so the hot path needs no lock here."""

    def __init__(self) -> None:
        self.finished: deque[tuple[Outcome | None, Group]] = deque(maxlen=_MOST_GROUPS)
        self.failed: deque[tuple[float, Flight]] = deque(maxlen=_MOST_GROUPS)
        self.trained: deque[Group] = deque(maxlen=_MOST_GROUPS)
        self.timings: deque[tuple[str, float]] = deque()
        self.counts: deque[tuple[str, int]] = deque()
        self.environments: set[str] = set()
        self._newest = -1

    def admitted(self, flights: Sequence[Flight]) -> None:
        """Count groups that were let in; those that are launched again were counted before."""
        for flight in flights:
            if flight.group_id > self._newest:
                self._newest = flight.group_id
                self.environments.add(flight.prompt.environment)
                self.counts.append((f"groups_admitted/{flight.prompt.environment}", 1))

    def landed(self, landing: Landing, *, kept: Sequence[Group], filtered: Sequence[Group]) -> None:
        """Count one landing."""
        self.finished.extend((None, group) for group in kept)
        self.finished.extend((Outcome.FILTERED, group) for group in filtered)
        failed = [flight for flight in landing.finished if flight.error is not None]
        now_s = time.time()
        self.failed.extend((now_s - flight.began_s, flight) for flight in failed)
        count = self.counts.append
        for name, number in (
            ("groups_kept", len(kept)),
            ("groups_filtered", len(filtered)),
            ("groups_failed", len(failed)),
            ("retries", landing.retries),
            ("stragglers_cancelled", landing.cancelled),
        ):
            if number:
                count((f"rollout/{name}", number))

    def took(self, name: str, seconds: float) -> None:
        """Add seconds to the stage ``time/<name>_s``."""
        self.timings.append((f"time/{name}_s", seconds))


class _Window:
    """What was seen since a moment, until it is condensed. Not thread-safe.

    Args:
        since_s: The moment, by the monotonic clock.
    """

    def __init__(self, since_s: float) -> None:
        self._since_s = self._sampled_s = since_s
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._samples = 0
        self._binding_s: defaultdict[str, float] = defaultdict(float)
        self._ended: defaultdict[str, _Sums] = defaultdict(_Sums)
        self._counts: Counter[str] = Counter()
        self._timings: defaultdict[str, float] = defaultdict(float)
        self._scores: defaultdict[str, list[float]] = defaultdict(list)
        self._latencies: list[float] = []
        self._lengths: list[int] = []
        self._rewards: list[float] = []
        self._generated = 0
        self._truncated = 0
        self._segments = 0
        self._mixed = 0

    def add_gauges(self, gauges: Mapping[str, float | str], now_s: float) -> float:
        """Take in one reading; returns the seconds since the one before, in which its limit is taken to have bound."""
        for name, value in gauges.items():
            if isinstance(value, (int, float)):
                self._sums[name] += value
        self._samples += 1
        seconds, self._sampled_s = now_s - self._sampled_s, now_s
        self._binding_s[str(gauges["limited_by"])] += seconds
        return seconds

    def add_meters(self, meters: Meters) -> None:
        """Take over what was counted."""
        for outcome, group in _taken(meters.finished):
            self._describe("admitted", group)
            if outcome is not None:
                self._describe(outcome, group)
            for t in group.trajectories:
                self._take(group.prompt.environment, t)
        for seconds, flight in _taken(meters.failed):
            for name in ("admitted", "failed"):
                self._ended[name].add(seconds, flight.landed.values())
            self._counts[f"groups_failed/{flight.prompt.environment}"] += 1
        for group in _taken(meters.trained):
            self._describe("trained", group)
        for name, seconds in _taken(meters.timings):
            self._timings[name] += seconds
        for name, count in _taken(meters.counts):
            self._counts[name] += count

    def _describe(self, what: str, group: Group) -> None:
        seconds = max(t.ended_s for t in group.trajectories) - min(t.started_s for t in group.trajectories)
        self._ended[what].add(seconds, group.trajectories)
        if what != "admitted":  # counted when they came in
            self._counts[f"groups_{what}/{group.prompt.environment}"] += 1

    def _take(self, environment: str, t: Trajectory) -> None:
        self._latencies.append(t.ended_s - t.started_s)
        self._lengths.append(len(t.token_ids))
        self._rewards.append(t.reward)
        self._generated += t.trainable_tokens
        self._truncated += t.finish_reason == "length"
        self._segments += len(t.segments)
        self._mixed += t.head != t.tail
        self._scores[f"reward/{environment}"].append(t.reward)
        for part, value in t.reward_parts.items():
            self._scores[f"reward/{environment}/{part}"].append(value)

    def condense(self, now_s: float, *, several_environments: bool) -> dict[str, float]:
        """The figures (see :meth:`MetricsLoop.drain`)."""
        seconds = max(now_s - self._since_s, 1e-9)
        metrics: dict[str, float] = {f"queue/{name}": total / self._samples for name, total in self._sums.items()}
        metrics |= {f"limit/{limit}": bound_s / seconds for limit, bound_s in self._binding_s.items()}
        metrics |= self._timings
        metrics |= {
            name: float(count)
            for name, count in self._counts.items()
            if several_environments or not name.startswith("groups_")
        }
        metrics |= {name: float(np.mean(scores)) for name, scores in self._scores.items()}
        for what, ended in self._ended.items():
            metrics[f"latency/{what}_s"] = ended.seconds / ended.groups
            if ended.measured:
                metrics[f"length/{what}"] = ended.tokens / ended.measured
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
                "rollout/segments_mean": self._segments / len(latency),
                "rollout/mixed_share": self._mixed / len(latency),
                "rollout/reward_mean": float(np.mean(self._rewards)),
            }
        return metrics


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
        self._window = _Window(time.monotonic())

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
            self._limits_s[str(gauges["limited_by"])] += self._window.add_gauges(gauges, time.monotonic())
            self._window.add_meters(self._meters)

    def drain(self) -> dict[str, float]:
        """What happened since the last drain.

        Returns:
            ``queue/*``: mean of each gauge; ``limit/*``: share of the time each term bound admission; ``rollout/*``:
            finished rollouts (count, latency in seconds, length in tokens, reward, ``segments_mean``: segments of a
            trajectory, ``mixed_share``: those that several versions sampled) and group outcomes; ``reward/*``: mean
            reward of each environment, and of each part; ``length/*`` (tokens of a trajectory) and
            ``latency/*_s`` (seconds from a group's first attempt to its last end): means over the groups that were
            trained, filtered or failed, and ``admitted``: over all that ended, whatever became of them;
            ``groups_<outcome>/*`` with several environments: how many groups of each; ``time/*_s``: seconds spent in
            each stage.
        """
        self.sample()
        with self._lock:
            now_s = time.monotonic()
            ended, self._window = self._window, _Window(now_s)
        return ended.condense(now_s, several_environments=len(self._meters.environments) > 1)

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
