"""Simulates the loop on a virtual clock with the gate and planner of real runs: ages, waits and steps to expect."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from async_rl.orchestrator.gate import CapacityGate
from async_rl.orchestrator.latencies import Latencies
from async_rl.orchestrator.planner import BatchPlanner, Plan


class Planner(Protocol):
    """The part of ``BatchPlanner`` a simulation uses, so that other orders can be compared with it."""

    def admitted(self, group_id: int, version: int) -> None:
        """See ``BatchPlanner.admitted``."""

    def keep(self, group_id: int, head: int | None) -> None:
        """See ``BatchPlanner.keep``."""

    def end(self, group_id: int) -> None:
        """See ``BatchPlanner.end``."""

    def plan(self, trained: int) -> Plan:
        """See ``BatchPlanner.plan``."""


@dataclass(frozen=True)
class Scenario:
    """The task and the machine: what a setting can't change.

    Attributes:
        latencies: How long rollouts run. Taken as given: an engine that slows down under more of them isn't modelled.
        batch_size: Groups per step, ``>= 1``.
        group_size: Trajectories per group, ``>= 1``.
        train_s: Seconds of one training step, ``>= 0``.
        load_s: Seconds from the end of a step until an engine serves its weights, ``>= 0``; engines load in turn.
        filtered: Share of finished groups that are filtered or fail, in ``[0, 1)``.
        sampling_policy: ``segment``: an engine swaps weights in flight. ``trajectory``: an engine that must load is
            closed to new groups until none of its rollouts is in flight.
        engines: Number of engines, ``>= 1``; a group runs on the least busy open one.
        steps: Training steps to simulate, ``>= 1``.
        seed: Of the random draws.
    """

    latencies: Latencies
    batch_size: int
    group_size: int = 1
    train_s: float = 1.0
    load_s: float = 0.0
    filtered: float = 0.0
    sampling_policy: Literal["segment", "trajectory"] = "segment"
    engines: int = 1
    steps: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.filtered < 1:
            raise ValueError(f"filtered must be in [0, 1), got {self.filtered}: nothing would ever be trained")
        if self.train_s < 0 or self.load_s < 0:
            raise ValueError(f"train_s and load_s must be at least 0, got {self.train_s} and {self.load_s}")
        if self.engines < 1:
            raise ValueError(f"engines must be at least 1, got {self.engines}")
        if self.sampling_policy not in ("segment", "trajectory"):
            raise ValueError(f"sampling_policy must be segment or trajectory, got {self.sampling_policy!r}")


@dataclass(frozen=True)
class Setting:
    """What a user chooses; see ``CapacityGate`` and ``BatchPlanner`` for the meaning and the checks."""

    max_staleness: int | None
    admit_ahead: int
    max_concurrent: int
    oversample_factor: float = 1.0
    stale_policy: Literal["wait", "mask", "allow"] = "wait"


@dataclass(frozen=True)
class Simulation:
    """What came of one setting in one scenario.

    Attributes:
        setting: The setting.
        ages: Age of every trained group in versions, ``[steps * batch_size]``.
        step_s: Mean seconds per step, waits included.
        lower_bound_s: What no planner that keeps the bound can beat with the same admissions, per step: step v can't
            end before the later of (end of step v - 1, the ((v + 1) * B)-th completion, the last completion among
            groups due by v) + training. Where a group got older than the bound, nothing counts as due.
        wait_fraction: Share of the time the trainer waited for a batch.
        limits: Share of the time each term of the capacity bound admission.
        most_groups: Most groups in the system at once.
    """

    setting: Setting
    ages: NDArray[np.int64]
    step_s: float
    lower_bound_s: float
    wait_fraction: float
    limits: dict[str, float]
    most_groups: int

    @property
    def max_age(self) -> int:
        """Oldest group trained."""
        return int(self.ages.max())

    @property
    def mean_age(self) -> float:
        """Mean over groups."""
        return float(self.ages.mean())

    @property
    def p99_age(self) -> float:
        """99th percentile over groups."""
        return float(np.percentile(self.ages, 99))

    @property
    def limited_by(self) -> str:
        """The term of the capacity that bound longest."""
        return max(self.limits, key=self.limits.__getitem__)


def simulate(scenario: Scenario, setting: Setting, planner: Planner | None = None) -> Simulation:
    """Run one setting to the end of the scenario.

    Args:
        scenario: The task and the machine.
        setting: What to try.
        planner: Forms the batches instead of the setting's ``BatchPlanner``; for comparisons.

    Raises:
        ValueError: If the setting contradicts itself or the scenario.
    """
    if planner is None:
        planner = BatchPlanner(
            batch_size=scenario.batch_size, max_staleness=setting.max_staleness, stale_policy=setting.stale_policy
        )
    return _VirtualLoop(scenario, setting, planner).run()


def pick(simulations: Sequence[Simulation], tolerance: float = 0.05) -> tuple[Simulation, str]:
    """The setting we would take, and why: of those about as fast as the fastest, the one with the youngest data.

    Args:
        simulations: Settings tried in one scenario, at least one.
        tolerance: Share of the fastest step time that younger data is worth.
    """
    fastest = min(simulations, key=lambda s: s.step_s)
    near = [s for s in simulations if s.step_s <= fastest.step_s * (1 + tolerance)]

    def preference(s: Simulation) -> tuple[float, float, int]:
        bound = np.inf if s.setting.max_staleness is None else s.setting.max_staleness
        return s.setting.admit_ahead, bound, s.setting.max_concurrent

    best = min(near, key=preference)
    return best, (
        f"{len(near)} of {len(simulations)} settings are within {tolerance:.0%} of the fastest step "
        f"({fastest.step_s:.2f} s); of these it has the smallest W (mean age {best.mean_age:.2f}), then S "
        f"(max age {best.max_age}), then C"
    )


class _VirtualLoop:
    """The state of one simulation; events are (time, order, kind, group or engine)."""

    def __init__(self, scenario: Scenario, setting: Setting, planner: Planner) -> None:
        self._scenario = scenario
        self._setting = setting
        self._planner = planner
        self._gate = CapacityGate(
            batch_size=scenario.batch_size,
            group_size=scenario.group_size,
            max_concurrent=setting.max_concurrent,
            max_staleness=None if setting.stale_policy == "allow" else setting.max_staleness,
            admit_ahead=setting.admit_ahead,
            oversample_factor=setting.oversample_factor,
            max_steps=scenario.steps,
        )
        self._rng = np.random.default_rng(scenario.seed)
        self._now_s = 0.0
        self._events: list[tuple[float, int, str, int]] = []
        self._scheduled = 0
        self._trained = 0
        self._served = [0] * scenario.engines
        self._in_flight = [0] * scenario.engines
        self._closed: int | None = None  # the engine whose turn it is to load
        self._loading: int | None = None  # the version it loads
        self._training: tuple[int, ...] = ()
        self._waited_s = 0.0
        self._head: list[int] = []  # of every group ever admitted
        self._engine: list[int] = []
        self._left: list[int] = []
        self._completed: list[tuple[float, int]] = []  # (second, head) of every kept group
        self._ages: list[int] = []
        self._limits: defaultdict[str, float] = defaultdict(float)
        self._most_groups = 0

    def run(self) -> Simulation:
        idle_since_s = 0.0
        while self._trained < self._scenario.steps:
            if not self._training:
                self._training = self._planner.plan(self._trained).groups
                if self._training:
                    self._waited_s += self._now_s - idle_since_s
                    self._ages += [self._trained - self._head[group] for group in self._training]
                    self._at(self._scenario.train_s, "step", 0)
            limited_by = self._admit()
            before_s = self._now_s
            self._now_s, _, kind, subject = heapq.heappop(self._events)
            self._limits[limited_by] += self._now_s - before_s
            if kind == "done":
                self._trajectory_done(subject)
            elif kind == "loaded":
                self._loaded(subject)
            else:
                self._step_done()
                idle_since_s = self._now_s
        return self._result()

    def _at(self, delay_s: float, kind: str, subject: int) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (self._now_s + delay_s, self._scheduled, kind, subject))

    def _admit(self) -> str:
        draining = self._closed if self._scenario.sampling_policy == "trajectory" else None
        engines = [engine for engine in range(len(self._served)) if engine != draining]
        if not engines:
            return "engines"
        served = min(self._served[engine] for engine in engines)
        groups, limited_by = self._gate.capacity(self._trained, served)
        for _ in range(groups):
            group = len(self._head)
            engine = min(engines, key=self._in_flight.__getitem__)
            self._gate.admit(group)
            self._planner.admitted(group, served)
            self._head.append(self._served[engine])
            self._engine.append(engine)
            self._left.append(self._scenario.group_size)
            self._in_flight[engine] += 1
            for seconds in self._scenario.latencies.draw(self._rng, self._scenario.group_size):
                self._at(float(seconds), "done", group)
        self._most_groups = max(self._most_groups, self._gate.running_groups + self._gate.kept_groups)
        return limited_by

    def _trajectory_done(self, group: int) -> None:
        self._gate.trajectory_ended(group)
        self._left[group] -= 1
        if self._left[group]:
            return
        if self._scenario.filtered and self._rng.random() < self._scenario.filtered:
            self._gate.end(group)
            self._planner.end(group)
        else:
            self._gate.keep(group)
            self._planner.keep(group, self._head[group])
            self._completed.append((self._now_s, self._head[group]))
        self._in_flight[self._engine[group]] -= 1
        self._load_next()

    def _step_done(self) -> None:
        for group in self._training:
            self._gate.end(group)
            self._planner.end(group)
        self._training = ()
        self._trained += 1
        self._load_next()

    def _load_next(self) -> None:
        """Engines load one after the other, always the newest version."""
        if self._loading is not None:
            return
        if self._closed is None:
            oldest = min(range(len(self._served)), key=self._served.__getitem__)
            if self._served[oldest] == self._trained:
                return
            self._closed = oldest
        if self._scenario.sampling_policy == "trajectory" and self._in_flight[self._closed]:
            return
        self._loading = self._trained
        self._at(self._scenario.load_s, "loaded", self._closed)

    def _loaded(self, engine: int) -> None:
        assert self._loading is not None
        self._served[engine] = self._loading
        self._loading = self._closed = None
        self._load_next()

    def _result(self) -> Simulation:
        scenario = self._scenario
        total_s = max(self._now_s, 1e-9)
        return Simulation(
            setting=self._setting,
            ages=np.asarray(self._ages),
            step_s=self._now_s / scenario.steps,
            lower_bound_s=self._lower_bound_s() / scenario.steps,
            wait_fraction=self._waited_s / total_s,
            limits={name: seconds / total_s for name, seconds in sorted(self._limits.items())},
            most_groups=self._most_groups,
        )

    def _lower_bound_s(self) -> float:
        scenario, bound = self._scenario, self._setting.max_staleness
        due_s = [0.0] * scenario.steps  # last completion among the groups due in step v
        if bound is not None and max(self._ages) <= bound:
            for second, head in self._completed:
                if head + bound < scenario.steps:
                    due_s[head + bound] = max(due_s[head + bound], second)
        end_s = 0.0
        for version in range(scenario.steps):
            enough_s = self._completed[(version + 1) * scenario.batch_size - 1][0]
            end_s = max(end_s, enough_s, due_s[version]) + scenario.train_s
        return end_s
