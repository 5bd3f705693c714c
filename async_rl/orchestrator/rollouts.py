"""RolloutThread: one event loop that runs many rollouts, with deadlines, retries and each group's completion rule."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from async_rl.orchestrator.records import EngineSlot, Flight, Landing, is_engine_death
from async_rl.types import RolloutTask, Trajectory

if TYPE_CHECKING:
    from async_rl.orchestrator.settings import OrchestratorSettings

log = logging.getLogger(__name__)

_STOP_S = 1.0  # how long cancelled rollouts get to clean up when the thread stops


@dataclass(slots=True, eq=False)
class _Attempt:
    """One attempt in the air."""

    flight: Flight
    task: RolloutTask
    deadline_s: float
    over: bool = False
    handle: asyncio.Task[None] = field(init=False)  # set in the moment it is launched


class RolloutThread:
    """Runs the samples of the flights it is given and reports what ended, many at a time.

    One asyncio task per attempt and no lock per rollout: all bookkeeping of a flight happens on this thread, and
    results leave it in one :class:`Landing` per turn of the loop. All attempts share one timeout, so the oldest is
    always the first due and one sweep from the front replaces a timer per rollout. An attempt past its
    deadline is out at once, whether or not its code obeys the cancellation. An engine that dies takes all its flights
    with it: that is no failure of theirs, and they leave with what they have landed.

    Args:
        settings: Deadline of an attempt, retries, and how long a complete quorum waits for the rest.
        make_seed: ``(prompt id, sample index, attempt) -> seed``.
        land: Takes a :class:`Landing`, on this thread.
        crashed: Takes an exception that is a bug of ours, or fatal by its own word (``error.fatal``).
    """

    def __init__(
        self,
        *,
        settings: OrchestratorSettings,
        make_seed: Callable[[str, int, int], int],
        land: Callable[[Landing], None],
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._timeout_s = settings.rollout_timeout_s
        self._max_retries = settings.max_retries
        self._straggler_timeout_s = settings.straggler_timeout_s
        self._make_seed = make_seed
        self._land = land
        self._crashed = crashed
        self._loop = asyncio.new_event_loop()
        self._inbox: deque[Sequence[Flight]] = deque()
        self._in_the_air: dict[_Attempt, None] = {}  # in the order they started, which is the order they are due
        self._taking = False
        self._landing = Landing()
        self._landing_scheduled = False
        self._stopped = False

    @property
    def in_the_air(self) -> int:
        """Attempts running now (read from any thread)."""
        return len(self._in_the_air)

    # called from any thread

    def submit(self, flights: Sequence[Flight]) -> None:
        """Start the missing samples of these flights. Ignored once stopped."""
        self._inbox.append(flights)
        if not self._taking:  # waking the loop costs a system call, so one wake-up takes all that waits
            self._taking = True
            self._call_soon(self._take)

    def abandon(self, slot: EngineSlot) -> None:
        """The engine died: give up the flights that were launched on it before."""
        self._call_soon(partial(self._abandon, slot))

    def stop(self) -> None:
        """Cancel everything and end :meth:`run`; nothing lands any more."""
        self._call_soon(self._begin_stop)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the thread has stopped
            self._loop.call_soon_threadsafe(callback)

    # the thread

    def run(self) -> None:
        """The thread's body; returns after :meth:`stop`."""
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_log_stray_exception)
        self._sweep()
        try:
            self._loop.run_forever()
            if self._in_the_air:
                cancelled = [attempt.handle for attempt in self._in_the_air]
                self._loop.run_until_complete(asyncio.wait(cancelled, timeout=_STOP_S))
                if left := sum(not task.done() for task in cancelled):
                    log.warning("%d rollouts went on although they were cancelled; they are left behind", left)
                    self._loop.set_exception_handler(lambda loop, context: None)  # each would complain by itself
        finally:
            self._loop.close()

    def _begin_stop(self) -> None:
        self._stopped = True
        for attempt in self._in_the_air:
            attempt.over = True
            attempt.handle.cancel()
        self._loop.stop()

    def _take(self) -> None:
        self._taking = False
        if self._stopped:
            return
        try:
            while self._inbox:
                for flight in self._inbox.popleft():
                    for sample_index in flight.missing:
                        self._launch(flight, sample_index, 0)
                    if not flight.missing:
                        self._finish(flight)
                    elif flight.landed:
                        self._time_stragglers(flight)
        except BaseException as bug:
            self._crashed(bug)

    def _launch(self, flight: Flight, sample_index: int, number: int) -> None:
        prompt = flight.prompt
        seed = self._make_seed(prompt.id, sample_index, number)
        task = RolloutTask(flight.group_id, prompt, sample_index, number, seed)
        attempt = _Attempt(flight, task, time.monotonic() + self._timeout_s)
        flight.running[sample_index] = attempt
        self._in_the_air[attempt] = None
        attempt.handle = self._loop.create_task(
            self._run(attempt), name=f"group {flight.group_id} sample {sample_index} attempt {number}"
        )

    async def _run(self, attempt: _Attempt) -> None:
        flight = attempt.flight
        try:
            try:
                trajectory = await flight.rollout(attempt.task, flight.slot.engine)
            except (
                BaseException
            ) as error:  # user code: even SystemExit or a stray CancelledError fails one attempt only
                if not attempt.over:
                    self._failed(attempt, error)
            else:
                if not attempt.over:
                    self._succeeded(attempt, trajectory)
        except BaseException as bug:
            self._crashed(bug)
        finally:
            del self._in_the_air[attempt]

    def _succeeded(self, attempt: _Attempt, trajectory: Trajectory) -> None:
        flight, sample_index = attempt.flight, attempt.task.sample_index
        if (death := getattr(flight.slot.engine, "died", None)) is not None or flight.lost_engine:
            # User code may have caught the engine's death and made a result of it.
            self._lose(flight, death or RuntimeError(f"engine {flight.slot.engine.name} died"))
            return
        self._close(attempt)
        landing = self._landing
        flight.landed[sample_index] = trajectory
        if flight.evaluates:
            landing.evaluated += 1
        else:
            if not landing.outcomes or landing.outcomes[-1] is not None:
                landing.outcomes.append(None)
            landing.landed.append((flight.group_id, trajectory))
        self._sample_ended(flight)

    def _failed(self, attempt: _Attempt, error: BaseException) -> None:
        flight, task = attempt.flight, attempt.task
        if flight.lost_engine or is_engine_death(error):
            self._lose(flight, error)
            return
        self._close(attempt)
        if getattr(error, "fatal", False):
            self._crashed(error)
        if flight.evaluates:  # counts against nothing of the training's, its budget of failures included
            self._landing.evaluated += 1
        else:
            self._landing.outcomes.append(error)
        if task.attempt < self._max_retries:
            self._landing.retries += not flight.evaluates
            self._launch(flight, task.sample_index, task.attempt + 1)
            self._schedule_landing()
            return
        flight.given_up[task.sample_index] = error
        if len(flight.landed) + len(flight.running) < flight.needed:
            flight.error = error
            self._cancel_rest(flight)
        self._sample_ended(flight)

    def _close(self, attempt: _Attempt) -> None:
        attempt.over = True
        del attempt.flight.running[attempt.task.sample_index]

    def _sample_ended(self, flight: Flight) -> None:
        if not flight.running:
            self._finish(flight)
            return
        self._landing.ended.append(flight.group_id)
        self._time_stragglers(flight)
        self._schedule_landing()

    def _time_stragglers(self, flight: Flight) -> None:
        if self._straggler_timeout_s is not None and 0 < flight.needed <= len(flight.landed) and flight.timer is None:
            flight.timer = self._loop.call_later(self._straggler_timeout_s, self._leave_stragglers, flight)

    def _finish(self, flight: Flight) -> None:
        self._end(flight)
        self._landing.finished.append(flight)

    def _lose(self, flight: Flight, error: BaseException) -> None:
        self._cancel_rest(flight)
        self._end(flight)
        self._landing.lost.append((flight, error))

    def _end(self, flight: Flight) -> None:
        flight.over = True
        if flight.timer is not None:
            flight.timer.cancel()
        self._schedule_landing()

    def _abandon(self, slot: EngineSlot) -> None:
        try:
            flights = {id(a.flight): a.flight for a in self._in_the_air if a.flight.slot is slot and not a.over}
            for flight in flights.values():
                if flight.lost_engine and not flight.over:
                    self._lose(flight, RuntimeError(f"engine {slot.engine.name} died"))
        except BaseException as bug:
            self._crashed(bug)

    def _cancel_rest(self, flight: Flight) -> None:
        for attempt in list(flight.running.values()):
            self._close(attempt)
            attempt.handle.cancel()

    def _leave_stragglers(self, flight: Flight) -> None:
        if flight.over:
            return
        self._landing.cancelled += len(flight.running)
        self._cancel_rest(flight)
        self._finish(flight)

    # deadlines

    def _sweep(self) -> None:
        try:
            for attempt in self._overdue(time.monotonic()):
                task = attempt.task
                error = TimeoutError(
                    f"sample {task.sample_index} of group {task.group_id} (prompt {task.prompt.id}) did not finish "
                    f"within rollout_timeout_s={self._timeout_s:g} (attempt {task.attempt})"
                )
                self._failed(attempt, error)
                attempt.handle.cancel()
        except BaseException as bug:
            self._crashed(bug)
        self._loop.call_later(min(0.25, self._timeout_s / 4), self._sweep)

    def _overdue(self, now_s: float) -> list[_Attempt]:
        overdue = []
        for attempt in self._in_the_air:
            if attempt.deadline_s > now_s:
                break
            if not attempt.over:
                overdue.append(attempt)
        return overdue

    # reporting

    def _schedule_landing(self) -> None:
        if not self._landing_scheduled:
            self._landing_scheduled = True
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._landing_scheduled = False
        landing, self._landing = self._landing, Landing()
        if self._stopped:
            return
        try:
            self._land(landing)
        except BaseException as bug:
            self._crashed(bug)


def _log_stray_exception(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """User code left an exception in a task of its own: worth a line, no reason to end the run."""
    log.warning("%s", context.get("message"), exc_info=context.get("exception"))  # type: ignore[arg-type]


def spread(flights: Sequence[Flight], threads: Sequence[RolloutThread], turn: itertools.count[int]) -> None:
    """Hand flights to the threads in turn, one hand-over per thread; a group stays on one thread."""
    if len(threads) == 1:
        threads[0].submit(flights)
        return
    shares: list[list[Flight]] = [[] for _ in threads]
    for flight in flights:
        shares[next(turn) % len(threads)].append(flight)
    for thread, share in zip(threads, shares, strict=True):
        if share:
            thread.submit(share)
