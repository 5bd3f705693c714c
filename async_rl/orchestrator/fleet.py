"""Fleet: the engines of a run - which serves what, what they load, how they die and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from async_rl.orchestrator.records import EngineLike, EngineSlot, Event, is_engine_death
from async_rl.orchestrator.restarts import EngineRestarts
from async_rl.orchestrator.version import PolicyVersion
from async_rl.orchestrator.watcher import WeightWatcher

if TYPE_CHECKING:
    from async_rl.orchestrator.room import Room
    from async_rl.orchestrator.settings import OrchestratorSettings
    from async_rl.orchestrator.supervisor import Supervisor
    from async_rl.orchestrator.waiting import MainThread, Poll

T = TypeVar("T")


class Fleet:
    """Owns the books of the engines, the thread that loads them and the one that brings them back.

    All methods but :meth:`died` belong to the main thread.

    Args:
        room: The lock and its conditions.
        main: How the main thread waits.
        supervisor: Runs the threads, says when to stop, takes the failure.
        settings: The numbers.
        engines: Started engines that sample for training; none serves before its first load.
        eval_engines: Started engines for evaluations alone.
        start_version: The policy version the run starts with.
        emit: Takes events for the main thread.
        loaded: Takes the seconds of each load, and whether it brought the engine a version it had not served.
        abandon: Has everything that was launched on an engine before given up.

    Attributes:
        slots: The books of all engines.
        train_slots: Those of the engines that sample for training.
    """

    def __init__(
        self,
        room: Room,
        main: MainThread,
        supervisor: Supervisor,
        *,
        settings: OrchestratorSettings,
        engines: Sequence[EngineLike],
        eval_engines: Sequence[EngineLike],
        start_version: int,
        emit: Callable[[Event], None],
        loaded: Callable[[float, bool], None],
        abandon: Callable[[EngineSlot], None],
    ) -> None:
        self._main = main
        self._supervisor = supervisor
        self.slots = [
            EngineSlot(
                index=i,
                engine=engine,
                served=PolicyVersion(start_version, name=f"served version of engine {engine.name}"),
                # `auto` takes `trajectory` only where an engine keeps several versions alive, and those never drain.
                drains=settings.sampling_policy == "trajectory" and engine.versions_alive == 1 and i < len(engines),
                evaluates=i >= len(engines),
                idle=i >= len(engines),
            )
            for i, engine in enumerate([*engines, *eval_engines])
        ]
        self.train_slots = self.slots[: len(engines)]
        self._restarts = EngineRestarts(
            room, self.slots, max_restarts=settings.max_engine_restarts, abandon=abandon, supervisor=supervisor
        )
        self._watcher = WeightWatcher(
            room,
            self.slots,
            load_timeout_s=settings.load_timeout_s,
            emit=emit,
            observe=loaded,
            died=self.died,
            supervisor=supervisor,
        )

    def start(self) -> None:
        """Start the threads."""
        self._supervisor.spawn("watcher", self._watcher.run)
        self._supervisor.spawn("engines", self._restarts.run)

    def publish(self, version: int, source: Any) -> None:
        """Offer weights to the engines; returns at once. The source is released when a newer one takes its place."""
        self._watcher.publish(version, source)

    def wait_served(self, version: int, poll: Poll, slots: Sequence[EngineSlot] = ()) -> None:
        """Block until every engine that is not dead is confirmed to serve ``version`` or newer, and one at least.

        Args:
            version: What to wait for.
            poll: Called at least ten times a second; what it raises ends the wait.
            slots: Which engines; default: those that sample for training.
        """

        def served() -> bool:
            alive = [slot for slot in slots or self.train_slots if not slot.lost]
            return bool(alive) and all(slot.loaded and slot.served.value >= version for slot in alive)

        self._main.wait(f"version {version} to be served", served, poll)

    def ask(self, engine: EngineLike, work: Callable[[], T], poll: Poll) -> T | None:
        """Wait until ``engine`` serves and do ``work`` with it; again, if it died over it and came back.

        Returns:
            What ``work`` returned, or ``None`` where the engine is dead and another of its kind serves: the run goes on
            with that one.
        """
        slot = next(slot for slot in self.slots if slot.engine is engine)

        def away() -> bool:
            return slot.lost and any(peer.loaded for peer in self.slots if peer.evaluates == slot.evaluates)

        while True:
            self._main.wait(f"engine {engine.name} to serve", lambda: slot.loaded or away(), poll)
            if away():
                return None
            incarnation = slot.incarnation
            try:
                return work()
            except Exception as error:
                if not is_engine_death(error):
                    raise
                self.died(slot, incarnation, error)

    def hold_loads(self) -> AbstractContextManager[None]:
        """A context in which no load is applied; entering waits for the one that is going on."""
        return self._watcher.hold()

    def died(self, slot: EngineSlot, incarnation: int, error: BaseException) -> None:
        """Somebody found an engine dead; from any thread. What is said of an earlier incarnation is ignored."""
        self._restarts.died(slot, incarnation, error)

    @property
    def restarts(self) -> int:
        """How often an engine that died was started again."""
        return self._restarts.count
