"""LoopThread: a named thread that runs one event loop, whose coroutines can be awaited from any other loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs an event loop until :meth:`stop`.

    Args:
        name: Name of the thread, for stack dumps and stall reports.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        if pending:
            self.loop.run_until_complete(asyncio.wait(pending, timeout=1.0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run ``coroutine`` on this loop and await it on the caller's. Cancelling the caller cancels the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    def stop(self, timeout_s: float) -> bool:
        """Cancel what is left, stop the loop and wait for the thread; whether it ended in time."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is closed: the thread is about to end
                self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()
