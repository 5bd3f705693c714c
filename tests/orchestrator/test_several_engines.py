"""Several engines: a version rolls through them one by one, by the stamps of what was generated meanwhile."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from loop_kit import FakeEngine, eventually, finished, patient, running, step

from async_rl.types import RolloutTask, Trajectory

SETTINGS = {
    "batch_size": 1,
    "group_size": 1,
    "max_staleness": 100,
    "admit_ahead": 100,
    "max_concurrent": 6,
    "max_steps": 200,
}


class GatedEngine(FakeEngine):
    """Stands still from the beginning of a load until the test lets it end."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gate = threading.Event()
        self.loading = False
        self.on_load = self._hold

    async def _hold(self, version: int) -> None:
        self.loading = version > 0  # the first one is let through
        while self.loading and not self.gate.is_set():
            await asyncio.sleep(0.002)
        self.loading = False
        self.gate.clear()


class Stamps:
    """Rollouts that end when the test lets them and their engine is not loading, and what they were stamped with."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.of: dict[int, tuple[str, int]] = {}
        self._permits = threading.Semaphore(0)

    async def __call__(self, task: RolloutTask, engine: Any) -> Trajectory:
        self.started.append(task.group_id)
        while engine.loading or not self._permits.acquire(blocking=False):
            await asyncio.sleep(0.002)
        self.of[task.group_id] = engine.name, engine.version
        return finished(task, engine)

    def more(self, count: int) -> set[tuple[str, int]]:
        """Let so many groups end; their stamps."""
        before = set(self.of)
        self._permits.release(count)
        eventually(lambda: len(self.of) == len(before) + count)
        return {stamp for group, stamp in self.of.items() if group not in before}

    def newest(self) -> int:
        """The newest group, once all that fit have started."""
        eventually(lambda: len(self.started) == len(self.of) + SETTINGS["max_concurrent"])
        return max(self.started)


def test_a_version_rolls_through_the_engines_and_generation_never_stops():
    first, second, stamps = GatedEngine("a"), GatedEngine("b"), Stamps()
    with running(stamps, engines=[first, second], **SETTINGS) as orchestrator:
        assert stamps.more(10) <= {("a", 0), ("b", 0)}
        step(orchestrator)
        eventually(lambda: first.loading)
        assert stamps.more(10) == {("b", 0)}
        assert not second.loading
        assert orchestrator.snapshot()["served_version"] == 0
        first.gate.set()
        eventually(lambda: second.loading)
        assert not first.loading
        assert stamps.more(10) == {("a", 1)}
        assert orchestrator.snapshot()["served_version"] == 0  # the lowest of the open ones
        second.gate.set()
        orchestrator.fleet.wait_served(1, patient())
        assert orchestrator.snapshot()["served_version"] == 1
        assert stamps.more(20) <= {("a", 1), ("b", 1)}


def test_however_fast_versions_come_the_engine_that_is_furthest_behind_loads_next():
    first, second, stamps = GatedEngine("a"), GatedEngine("b"), Stamps()
    with running(stamps, engines=[first, second], **SETTINGS) as orchestrator:
        stamps.more(10)
        step(orchestrator)
        for engine, other, version in ((first, second, 1), (second, first, 2), (first, second, 3), (second, first, 4)):
            eventually(lambda engine=engine: engine.loading)
            assert not other.loading
            step(orchestrator)  # a newer one is there before this one is loaded
            engine.gate.set()
            eventually(lambda engine=engine, version=version: engine.version == version)
        eventually(lambda: first.loading)
        first.gate.set()


def test_a_group_counts_as_old_as_the_oldest_open_engine_wherever_it_went():
    first, second, stamps = GatedEngine("a"), GatedEngine("b"), Stamps()
    with running(stamps, engines=[first, second], **SETTINGS) as orchestrator:
        stamps.more(1)
        step(orchestrator)
        eventually(lambda: first.loading)
        first.gate.set()
        eventually(lambda: second.loading)
        assert first.version == 1
        stamps.more(10)
        between = stamps.newest()
        second.gate.set()
        orchestrator.fleet.wait_served(1, patient())
        after = stamps.newest()
        stamps.more(10)
        groups = {group.id: group for _ in range(20) for group in step(orchestrator, publish=False).groups}
        assert {groups[i].admitted_version for i in groups if i <= between} == {0}
        assert {groups[i].admitted_version for i in groups if i > after} == {1}
        assert {stamps.of[i] for i in groups if i <= between} >= {("a", 1)}
        assert all(group.head >= group.admitted_version for group in groups.values())
