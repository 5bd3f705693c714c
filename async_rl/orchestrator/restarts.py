"""EngineRestarts: notices engines that died, and brings each back while the others go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from async_rl.orchestrator.records import EngineLike, EngineSlot
from async_rl.types import RunError

if TYPE_CHECKING:
    from async_rl.orchestrator.room import Room
    from async_rl.orchestrator.supervisor import Supervisor

log = logging.getLogger(__name__)

_LOOK_S = 0.25
_RETRY_S = 1.0


class EngineLostError(RunError):
    """An engine died and does not come back any more; names it, and its cause is the first death of the run."""


class EngineRestarts:
    """Closes the slot of a dead engine at once, starts the engine again in a thread of its own, and counts.

    An engine that was started again serves nothing; the watcher loads it, and only then its slot opens. A start that
    fails is another death. An engine that restarts itself (``engine.restarts_itself``: a remote server) is waited for
    as long as another one is open; with none open for ``engine.start_timeout_s`` seconds.

    Args:
        room: The lock and its conditions.
        slots: The engines.
        max_restarts: Restarts of one run, all engines together, and outages with none but such servers, ``>= 0``.
        abandon: Has everything that was launched on an engine before given up.
        supervisor: Runs the restarts, says when to stop, takes the failure.

    Attributes:
        count: Restarts so far.
    """

    def __init__(
        self,
        room: Room,
        slots: Sequence[EngineSlot],
        *,
        max_restarts: int,
        abandon: Callable[[EngineSlot], None],
        supervisor: Supervisor,
    ) -> None:
        self._room = room
        self._slots = slots
        self._max_restarts = max_restarts
        self._abandon = abandon
        self._supervisor = supervisor
        self._charged = 0
        self._first_death: BaseException | None = None
        self.count = 0

    def run(self) -> None:
        """The body of a thread that notices what died while nothing was asked of it."""
        while not self._supervisor.stopping.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """Notice engines that know themselves that they died (``engine.died``)."""
        for slot in self._slots:
            incarnation = slot.incarnation
            if not slot.lost and (death := getattr(slot.engine, "died", None)) is not None:
                self.died(slot, incarnation, death)

    def died(self, slot: EngineSlot, incarnation: int, error: BaseException) -> None:
        """Somebody found the engine dead; what is said of an earlier incarnation is no news and ignored."""
        with self._room.lock:
            if incarnation != slot.incarnation or self._supervisor.stopping.is_set():
                return
            slot.incarnation += 1
            slot.loaded = slot.open = False
            slot.lost = True
            slot.died_s = slot.died_s or time.monotonic()
            self._first_death = self._first_death or error
            charged = not (self._restarts_itself(slot) and self._another_is_open(slot))
            if charged and self._charged >= self._max_restarts:
                self._supervisor.fail(self._too_often(slot, error))
                return
            self._charged += charged
            self.count += 1
            self._room.engines.notify_all()
        log.warning("engine %s died (%s); %s", slot.engine.name, error, self._what_now(slot))
        self._abandon(slot)
        name = f"restart-{slot.engine.name}"
        self._supervisor.spawn(name, partial(self._restart, slot, slot.incarnation), may_end=True)

    def _restart(self, slot: EngineSlot, incarnation: int) -> None:
        engine, began_s = slot.engine, time.monotonic()
        loop = asyncio.new_event_loop()
        try:
            with self._supervisor.waiting(f"engine {engine.name} to come back"):
                while True:
                    try:
                        if not self._supervisor.complete(loop, _close_and_start(engine)):
                            return
                        break
                    except Exception as error:
                        if not self._restarts_itself(slot):
                            self._supervisor.stopping.wait(_RETRY_S)
                            self.died(slot, incarnation, error)
                            return
                        if self._another_is_open(slot):
                            began_s = time.monotonic()
                        elif time.monotonic() - began_s > _start_timeout_s(slot):
                            raise self._too_late(slot, error) from error
                    if self._supervisor.stopping.wait(_RETRY_S):
                        return
        finally:
            loop.close()
        with self._room.lock:
            slot.lost = False
            self._room.engines.notify_all()

    def _what_now(self, slot: EngineSlot) -> str:
        if not self._restarts_itself(slot):
            return f"starting it again (restart {self.count}, max_engine_restarts={self._max_restarts})"
        if self._another_is_open(slot):
            return "the run goes on with the others, and takes it back when it is up again"
        return (
            f"waiting for it to come back, up to start_timeout_s={_start_timeout_s(slot):g} s, as no other engine is "
            f"open (outage {self._charged}, max_engine_restarts={self._max_restarts})"
        )

    def _too_often(self, slot: EngineSlot, last: BaseException) -> EngineLostError:
        if self._restarts_itself(slot):
            what = f"is not waited for: {self._charged} outages were waited out"
        else:
            what = f"is not started again: {self._charged} restarts were made"
        fix = "See its log for why; raise run.max_engine_restarts if such deaths are to be expected"
        return self._lost(slot, f"{what} (max_engine_restarts={self._max_restarts})", last, fix)

    def _too_late(self, slot: EngineSlot, last: BaseException) -> EngineLostError:
        what = f"did not come back within start_timeout_s={_start_timeout_s(slot):g} s, and no other engine is open"
        return self._lost(
            slot, what, last, "Start it again and resume the run; engine.start_timeout_s is how long it waits"
        )

    def _lost(self, slot: EngineSlot, what: str, last: BaseException, fix: str) -> EngineLostError:
        first = self._first_death
        told = f"The first death: {first}" + ("" if last is first else f". The last: {last}")
        failure = EngineLostError(f"engine {slot.engine.name} died and {what}. {told}. {fix}")
        failure.__cause__ = first
        return failure

    def _another_is_open(self, slot: EngineSlot) -> bool:
        """Whether there is another one for what this one does; none is ever open to evaluations."""
        return not slot.evaluates and any(other.open for other in self._slots if other is not slot)

    @staticmethod
    def _restarts_itself(slot: EngineSlot) -> bool:
        return bool(getattr(slot.engine, "restarts_itself", False))


def _start_timeout_s(slot: EngineSlot) -> float:
    return float(slot.engine.start_timeout_s)  # type: ignore[attr-defined]


async def _close_and_start(engine: EngineLike) -> None:
    await engine.close()
    await engine.start()
