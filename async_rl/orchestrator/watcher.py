"""WeightWatcher: loads the newest published weights into every engine, and only then lets the served version move."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from async_rl.orchestrator.records import EngineSlot, Event, is_engine_death
from async_rl.types import RunError

if TYPE_CHECKING:
    from async_rl.orchestrator.room import Room
    from async_rl.orchestrator.supervisor import Supervisor


log = logging.getLogger(__name__)


class LoadError(RunError):
    """A weight load failed or did not finish in time; names the engine and the version."""


class _Published(NamedTuple):
    version: int
    source: Any


class WeightWatcher:
    """Owns every weight load. What is loaded is what is served: the version moves after ``load_weights`` returned.

    Engines load one after the other, those that serve nothing first, then the one furthest behind, however fast
    versions come; always the newest published version, so that none opens behind what another has served. What was
    published in between and read by nobody is released unread. The newest version is kept until there is a newer one,
    for an engine that comes back. An engine that drains is closed to new groups until its groups in flight are finished
    and it has loaded. One that only evaluates loads while it is needed, before the others, and is never opened. A
    failed or timed-out load ends the run and bumps nothing.

    Args:
        room: The lock and its conditions.
        slots: The engines.
        load_timeout_s: Deadline of one load into one engine.
        emit: Takes events for the main thread.
        observe: Takes the seconds of each load, and whether it brought the engine a version it had not served.
        died: Takes an engine that died while it loaded: slot, incarnation, what told so.
        supervisor: Says when to stop, and keeps the names of waits.
    """

    def __init__(
        self,
        room: Room,
        slots: Sequence[EngineSlot],
        *,
        load_timeout_s: float,
        emit: Callable[[Event], None],
        observe: Callable[[float, bool], None],
        died: Callable[[EngineSlot, int, BaseException], None],
        supervisor: Supervisor,
    ) -> None:
        self._room = room
        self._slots = slots
        self._load_timeout_s = load_timeout_s
        self._emit = emit
        self._observe = observe
        self._died = died
        self._supervisor = supervisor
        self._published: _Published | None = None
        self._newest: _Published | None = None
        self._announced = -1
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
        """No load changes what is served inside; waits for the one that is going on.

        An engine that comes back, and serves nothing, may load the version that the others serve.
        """
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
        try:
            while (job := self._next()) is not None:
                self._load(loop, *job)
        finally:
            with self._room.lock:
                self._stopped = True
                self._loading = False
                left = self._newest, self._published
                self._newest = self._published = None
            for published in left:
                if published is not None:
                    published.source.release()
            loop.close()

    def _next(self) -> tuple[EngineSlot, int, _Published] | None:
        """Wait for an engine that is behind and may load; with its incarnation and what to load. ``None``: the end."""
        with self._room.lock:
            while not self._supervisor.stopping.is_set():
                self._take_published()
                newest = self._newest
                behind = [slot for slot in self._slots if newest is not None and _is_behind(slot, newest.version)]
                if newest is not None and (slot := self._free(behind, newest.version)) is not None:
                    self._loading = True
                    newest.source.reserve()  # the trainer may publish twice before the engine begins to read
                    return slot, slot.incarnation, newest
                if newest is not None and not behind:
                    self._announce(newest.version)
                what = f"engine {behind[0].engine.name} to be free for a load" if behind else "a published version"
                with self._supervisor.waiting(what):
                    self._room.engines.wait(5.0)
        return None

    def _take_published(self) -> None:
        if self._published is not None:
            replaced, self._newest, self._published = self._newest, self._published, None
            if replaced is not None:
                replaced.source.release()

    def _free(self, behind: Sequence[EngineSlot], version: int) -> EngineSlot | None:
        """One that serves nothing, unless it would differ from those that are held; else the one furthest behind."""
        behind = sorted(behind, key=lambda slot: (not slot.evaluates, slot.served.value))  # an evaluation is waited for
        empty = next((slot for slot in behind if not slot.loaded), None)
        held = {
            s.served.value for s in self._slots if empty is not None and s.loaded and s.evaluates == empty.evaluates
        }
        if empty is not None and (not self._holds or held <= {version}):
            return empty
        slot = next((slot for slot in behind if slot.loaded), None)
        if slot is None:
            return None
        if slot.drains:
            slot.open = False
        return slot if not self._holds and not (slot.drains and slot.flights) else None

    def _announce(self, version: int) -> None:
        if version > self._announced and any(slot.loaded and not slot.evaluates for slot in self._slots):
            self._announced = version
            self._emit(Event("policy_loaded", version))
            self._room.batch.notify_all()

    def _load(self, loop: asyncio.AbstractEventLoop, slot: EngineSlot, incarnation: int, published: _Published) -> None:
        began_s = time.monotonic()
        what = f"engine {slot.engine.name}: loading version {published.version}"
        loading = slot.engine.load_weights(published.version, published.source)
        try:
            with self._supervisor.waiting(what):
                loaded = self._supervisor.complete(loop, loading, self._load_timeout_s)
        except Exception as error:
            if not is_engine_death(error) and slot.incarnation == incarnation:
                raise LoadError(f"{what} failed: {error}") from error
            self._died(slot, incarnation, error)
            return
        finally:
            with self._room.lock:
                self._loading = False
                self._room.batch.notify_all()
        if self._supervisor.stopping.is_set() or slot.incarnation != incarnation:
            return
        if not loaded:
            raise LoadError(f"{what} did not finish within load_timeout_s={self._load_timeout_s:g}")
        self._observe(time.monotonic() - began_s, published.version > slot.served.value)
        with self._room.lock:
            if slot.incarnation != incarnation:
                return
            slot.served.advance_to(published.version)
            slot.loaded = True
            slot.open = not slot.evaluates
            died_s, slot.died_s = slot.died_s, 0.0
            self._room.capacity.notify_all()
            self._room.batch.notify_all()
        if died_s:
            down_s = time.monotonic() - died_s
            log.warning(
                "engine %s is back after %.1f s and serves version %d", slot.engine.name, down_s, published.version
            )


def _is_behind(slot: EngineSlot, version: int) -> bool:
    return not slot.lost and not slot.idle and (not slot.loaded or slot.served.value < version)
