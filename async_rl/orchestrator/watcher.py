"""WeightWatcher: loads the newest published weights into every engine, and only then lets the served version move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from async_rl.orchestrator.records import EngineSlot, Event
from async_rl.types import RunError

if TYPE_CHECKING:
    from async_rl.orchestrator.room import Room
    from async_rl.orchestrator.supervisor import Supervisor


class LoadError(RunError):
    """A weight load failed or did not finish in time; names the engine and the version."""


class _Published(NamedTuple):
    version: int
    source: Any


class WeightWatcher:
    """Owns every weight load. What is loaded is what is served: the version moves after ``load_weights`` returned.

    Engines load one after the other, always the newest published version; what was published in between and read by
    nobody is released unread. An engine that drains is closed to new groups until its groups in flight are finished
    and it has loaded. A failed or timed-out load ends the run and bumps nothing.

    Args:
        room: The lock and its conditions.
        slots: The engines.
        load_timeout_s: Deadline of one load into one engine.
        emit: Takes events for the main thread.
        observe: Takes the seconds of each load.
        supervisor: Says when to stop, and keeps the names of waits.
    """

    def __init__(
        self,
        room: Room,
        slots: Sequence[EngineSlot],
        *,
        load_timeout_s: float,
        emit: Callable[[Event], None],
        observe: Callable[[float], None],
        supervisor: Supervisor,
    ) -> None:
        self._room = room
        self._slots = slots
        self._load_timeout_s = load_timeout_s
        self._emit = emit
        self._observe = observe
        self._supervisor = supervisor
        self._published: _Published | None = None
        self._holds = 0
        self._loading = False
        self._stopped = False

    # main thread

    def publish(self, version: int, source: Any) -> None:
        """Offer a version to the engines; never blocks. One that nobody began to load is released."""
        with self._room.lock:
            unread, self._published = self._published, _Published(version, source)
            if self._stopped:
                self._published = None
                unread = _Published(version, source)
            self._room.engines.notify_all()
        if unread is not None:
            unread.source.release()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """No load is applied inside; waits for the one that is going on."""
        with self._room.lock:
            self._holds += 1
        try:
            with self._room.lock, self._supervisor.waiting("the load that is going on"):
                while self._loading:
                    self._supervisor.check()
                    self._room.batch.wait(0.1)
            yield
        finally:
            with self._room.lock:
                self._holds -= 1
                self._room.engines.notify_all()

    # the thread

    def run(self) -> None:
        """The thread's body; returns when the supervisor says stop."""
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        newest: _Published | None = None
        try:
            while (newest := self._next(newest)) is not None:
                for slot in self._slots:
                    if slot.loaded and slot.served.value >= newest.version:
                        continue
                    if not self._empty(slot):
                        return
                    newest = self._newer(newest)
                    self._load(loop, slot, newest)
                    if self._supervisor.stopping.is_set():
                        return
        finally:
            with self._room.lock:
                self._stopped = True
                self._loading = False
                unread, self._published = self._published, None
            for published in (newest, unread):
                if published is not None:
                    published.source.release()
            loop.close()

    def _behind(self, published: _Published) -> bool:
        return any(not slot.loaded or slot.served.value < published.version for slot in self._slots)

    def _next(self, newest: _Published | None) -> _Published | None:
        """The same version while an engine is behind it, else the next published one; ``None`` at the end."""
        if newest is not None:
            if self._behind(newest):
                return newest
            newest.source.release()
            self._emit(Event("policy_loaded", newest.version))
            with self._room.lock:
                self._room.batch.notify_all()
        with self._room.lock, self._supervisor.waiting("a published version"):
            while not self._supervisor.stopping.is_set():
                if self._published is not None:
                    published, self._published = self._published, None
                    return published
                self._room.engines.wait(5.0)
        return None

    def _newer(self, newest: _Published) -> _Published:
        with self._room.lock:
            published, self._published = self._published, None
        if published is None:
            return newest
        newest.source.release()
        return published

    def _empty(self, slot: EngineSlot) -> bool:
        """Wait until the engine may load (it drained, nobody holds loads); ``False`` at the end of the run."""
        with self._room.lock, self._supervisor.waiting(f"engine {slot.engine.name} to be free for a load"):
            if slot.drains:
                slot.open = False
            while self._holds or (slot.drains and slot.flights):
                if self._supervisor.stopping.is_set():
                    return False
                self._room.engines.wait(5.0)
            self._loading = True
            return True

    def _load(self, loop: asyncio.AbstractEventLoop, slot: EngineSlot, published: _Published) -> None:
        began_s = time.monotonic()
        what = f"engine {slot.engine.name}: loading version {published.version}"
        load = loop.create_task(slot.engine.load_weights(published.version, published.source))
        try:
            with self._supervisor.waiting(what):
                while not load.done():
                    loop.run_until_complete(asyncio.wait({load}, timeout=0.1))
                    if self._supervisor.stopping.is_set():
                        break
                    if time.monotonic() - began_s > self._load_timeout_s and not load.done():
                        raise LoadError(f"{what} did not finish within load_timeout_s={self._load_timeout_s:g}")
            if not load.done():
                return
            if load.exception() is not None:
                raise LoadError(f"{what} failed: {load.exception()}") from load.exception()
        finally:
            if not load.done():
                load.cancel()
                loop.run_until_complete(asyncio.wait({load}, timeout=0.5))
            with self._room.lock:
                self._loading = False
                self._room.batch.notify_all()
        self._observe(time.monotonic() - began_s)
        with self._room.lock:
            slot.served.advance_to(published.version)
            slot.loaded = True
            slot.open = True
            self._room.capacity.notify_all()
            self._room.batch.notify_all()
