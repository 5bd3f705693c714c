"""A whole control plane with engines and rollouts that tests steer: no model, no sleeping on luck."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from async_rl.orchestrator.ledger_null import NullLedger
from async_rl.orchestrator.orchestrator import Orchestrator
from async_rl.orchestrator.prompts import PromptStream
from async_rl.orchestrator.settings import OrchestratorSettings
from async_rl.types import Batch, RolloutTask, Segment, Trajectory

PATIENCE_S = 20.0


def patient(seconds: float = PATIENCE_S) -> Callable[[], None]:
    """A poll that turns a hang into a failed test."""
    deadline_s = time.monotonic() + seconds

    def poll() -> None:
        assert time.monotonic() < deadline_s, f"still waiting after {seconds} s"

    return poll


def eventually(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    """Wait for another thread to make ``condition`` true."""
    poll = patient(seconds)
    while not condition():
        poll()
        time.sleep(0.002)


class FakeSource:
    """Weights without tensors."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.reserved = self.released = False

    def reserve(self) -> None:
        self.reserved = True

    def release(self) -> None:
        self.released = True


class FakeEngine:
    """Serves what it loaded last. ``on_load(version)`` may await, raise or hang."""

    def __init__(self, name: str = "fake-0", versions_alive: int = 1, on_load: Any = None) -> None:
        self.name = name
        self.versions_alive = versions_alive
        self.version = -1
        self.loads: list[int] = []
        self.on_load = on_load

    async def load_weights(self, version: int, source: FakeSource) -> None:
        assert not source.released, "a released source was loaded"
        if self.on_load is not None:
            await self.on_load(version)
        self.version = version
        self.loads.append(version)


def finished(task: RolloutTask, engine: Any, reward: float | None = None, head: int | None = None) -> Trajectory:
    """A trajectory of two generated tokens, stamped with what the engine serves now."""
    version = engine.version
    head = version if head is None else head
    return Trajectory(
        sample_index=task.sample_index,
        attempt=task.attempt,
        token_ids=[7, 8, 9],
        loss_mask=[0, 1, 1],
        logprobs=[0.0, -0.5, -0.25],
        segments=(Segment(head, 1, 2), Segment(version, 2, 3)),
        prompt_length=1,
        reward=float(task.sample_index) if reward is None else reward,
        started_s=time.time(),
        ended_s=time.time(),
    )


async def at_once(task: RolloutTask, engine: Any) -> Trajectory:
    """Finishes in its first turn of the loop."""
    return finished(task, engine)


class ByHand:
    """Rollouts that wait until the test ends them."""

    def __init__(self) -> None:
        self.started: list[RolloutTask] = []
        self._futures: dict[tuple[int, int, int], Future[Any]] = {}
        self._lock = threading.Lock()

    async def __call__(self, task: RolloutTask, engine: Any) -> Trajectory:
        head = engine.version
        with self._lock:
            future = self._futures.setdefault(self._key(task), Future())
            self.started.append(task)
        reward = await asyncio.wrap_future(future)
        return finished(task, engine, reward, head=head)

    @staticmethod
    def _key(task: RolloutTask) -> tuple[int, int, int]:
        return task.group_id, task.sample_index, task.attempt

    def wait_started(self, count: int) -> list[RolloutTask]:
        """Wait until ``count`` attempts have started; returns all of them."""
        eventually(lambda: len(self.started) >= count)
        with self._lock:
            return list(self.started)

    def finish(self, group_id: int, sample_index: int = 0, attempt: int = 0, reward: float = 1.0) -> None:
        """End one attempt with a reward."""
        self._future(group_id, sample_index, attempt).set_result(reward)

    def fail(self, group_id: int, sample_index: int = 0, attempt: int = 0, error: BaseException | None = None) -> None:
        """End one attempt with an error."""
        self._future(group_id, sample_index, attempt).set_exception(error or ValueError("by hand"))

    def _future(self, *key: int) -> Future[Any]:
        with self._lock:
            return self._futures.setdefault(key, Future())  # type: ignore[arg-type]


def make_settings(**changes: Any) -> OrchestratorSettings:
    """Small numbers, overridden by ``changes``; W and C follow from them unless given."""
    values: dict[str, Any] = {
        "max_steps": 5, "max_staleness": 1, "batch_size": 2, "group_size": 2, "rollout_timeout_s": 10.0,
        "metrics_interval_s": 0.05,
    } | changes  # fmt: skip
    staleness = values["max_staleness"]
    ahead = values.setdefault("admit_ahead", min(staleness, 2) if staleness is not None else 2)
    values.setdefault("max_concurrent", (ahead + 1) * values["batch_size"] * values["group_size"])
    return OrchestratorSettings(**values)


def make_prompts(rows: int = 1000, epochs: int | None = None) -> PromptStream:
    """Prompts in order."""
    return PromptStream({"toy": [{"n": n} for n in range(rows)]}, epochs=epochs, shuffle=False, seed=0)


def centred(rewards: Any) -> Any:
    """Reward minus the mean of the group."""
    return [[r - sum(group) / len(group) for r in group] for group in rewards]


@contextmanager
def running(
    rollout: Any = at_once,
    *,
    engines: list[FakeEngine] | None = None,
    eval_engines: Sequence[FakeEngine] = (),
    prompts: PromptStream | None = None,
    ledger: Any = None,
    start_version: int = 0,
    recovered: Any = None,
    resume: bool = True,
    close_s: float = 5.0,
    on_stall: Callable[[str], None] = lambda report: None,
    **settings: Any,
) -> Any:
    """An orchestrator whose engines serve ``start_version``; closed at the end, with every group accounted for."""
    record = ledger or NullLedger()
    orchestrator = Orchestrator(
        make_settings(**settings),
        engines=engines or [FakeEngine()],
        eval_engines=eval_engines,
        prompts=prompts or make_prompts(),
        rollout=rollout,
        advantages=centred,
        ledger=record,
        start_version=start_version,
        recovered=recovered,
        on_stall=on_stall,
    )
    orchestrator.start()
    try:
        orchestrator.fleet.publish(start_version, FakeSource(start_version))
        orchestrator.fleet.wait_served(start_version, patient())
        if resume:
            orchestrator.resume()
        yield orchestrator
    finally:
        left = orchestrator.close(close_s)
        record.close()
    assert left == []
    books = orchestrator.outcomes()
    assert books["running"] == books["kept"] == 0
    assert books["admitted"] == sum(books[o] for o in ("trained", "filtered", "failed", "dropped", "saved"))


def waits(orchestrator: Orchestrator) -> dict[str, str]:
    """Which thread waits for what, as a stall report would tell."""
    return orchestrator._supervisor.waits()


def step(orchestrator: Orchestrator, publish: bool = True) -> Batch:
    """Train one batch and publish the version it makes."""
    batch = orchestrator.next_batch(patient())
    assert batch is not None
    orchestrator.batch_trained(batch)
    if publish:
        orchestrator.fleet.publish(batch.version + 1, FakeSource(batch.version + 1))
    return batch


def train(orchestrator: Orchestrator) -> list[Batch]:
    """Train until nothing is left to train."""
    batches = []
    while (batch := orchestrator.next_batch(patient())) is not None:
        orchestrator.batch_trained(batch)
        orchestrator.fleet.publish(batch.version + 1, FakeSource(batch.version + 1))
        batches.append(batch)
    return batches
