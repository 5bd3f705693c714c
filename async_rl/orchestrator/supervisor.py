"""Starts the control plane's threads, keeps the first failure, and knows who waits for what."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger(__name__)


class Supervisor:
    """First failure wins: whatever ends a thread early is kept, wakes every waiter, and is raised on the main thread.

    Args:
        wake_all: Wakes everybody who waits on a condition, so that they see the failure or the stop at once.
    """

    def __init__(self, wake_all: Callable[[], None]) -> None:
        self.stopping = threading.Event()
        self._wake_all = wake_all
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._waits: dict[str, tuple[str, float]] = {}

    def spawn(self, name: str, body: Callable[[], None], *, may_end: bool = False) -> None:
        """Run ``body`` in a daemon thread; an exception that leaves it is a failure of the run.

        So is its end while the run goes on, unless it ``may_end``.
        """

        def run() -> None:
            try:
                body()
            except BaseException as error:
                error.add_note(f"in thread {name!r} of the control plane")
                self.fail(error)
            else:
                if not may_end and not self.stopping.is_set():
                    self.fail(RuntimeError(f"thread {name!r} of the control plane ended while the run goes on"))

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def complete(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, None], timeout_s: float = float("inf")
    ) -> bool:
        """Run a coroutine on the calling thread's ``loop``; it is cancelled when the run stops or the time is up.

        Returns:
            Whether it came to its end.

        Raises:
            Exception: What the coroutine raised.
        """
        deadline_s = time.monotonic() + timeout_s
        task = loop.create_task(coroutine)
        try:
            loop.run_until_complete(asyncio.wait({task}, timeout=0.0))
            while not (task.done() or self.stopping.is_set() or time.monotonic() > deadline_s):
                loop.run_until_complete(asyncio.wait({task}, timeout=0.1))
        finally:
            if came_to_its_end := task.done():
                task.result()
            else:
                task.cancel()
                loop.run_until_complete(asyncio.wait({task}, timeout=0.5))
        return came_to_its_end

    def fail(self, error: BaseException) -> None:
        """Record a failure (only the first counts) and wake every waiter."""
        with self._lock:
            if self._failure is None and not self.stopping.is_set():
                self._failure = error
        self._wake_all()

    def check(self) -> None:
        """Raise the first failure, with its own traceback."""
        if self._failure is not None:
            raise self._failure

    @property
    def failed(self) -> bool:
        """Whether there was a failure."""
        return self._failure is not None

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Name what the calling thread waits for, for the stall report."""
        name = threading.current_thread().name
        self._waits[name] = (what, time.monotonic())
        try:
            yield
        finally:
            self._waits.pop(name, None)

    def waits(self) -> dict[str, str]:
        """Who waits for what, and for how long, by thread name."""
        now_s = time.monotonic()
        return {name: f"{what}, for {now_s - since_s:.1f} s" for name, (what, since_s) in list(self._waits.items())}

    def stop(self) -> None:
        """Tell every thread to end. Failures after this are consequences and not recorded."""
        with self._lock:
            self.stopping.set()
        self._wake_all()

    def join(self, timeout_s: float) -> list[str]:
        """Wait for the threads; logs the stacks of those still running after ``timeout_s`` and returns their names."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        alive = [thread for thread in self._threads if thread.is_alive()]
        frames = sys._current_frames()
        for thread in alive:
            if thread.ident in frames:
                stack = "".join(traceback.format_stack(frames[thread.ident]))
                log.error("thread %s did not stop within %.1f s; it is at:\n%s", thread.name, timeout_s, stack)
        return [thread.name for thread in alive]
