"""StopSignals: the first SIGINT or SIGTERM asks the run to stop, the second ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def terminating_interrupts() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt as SIGINT does: while nothing is trained there is nothing to save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopSignals:
    """Routes SIGINT and SIGTERM to ``request_stop`` inside a ``with`` block; on the main thread, else it does nothing.

    Engine processes end with this one, so the hard exit on a second signal leaves nothing behind.

    Args:
        request_stop: Called with the signal's name, from the signal handler: it may only set flags.
    """

    def __init__(self, request_stop: Callable[[str], None]) -> None:
        self._request_stop = request_stop
        self._before: dict[signal.Signals, Any] = {}
        self._seen = 0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._seen = 0
            self._before = {s: signal.getsignal(s) for s in _SIGNALS}
            self.install()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)
        self._before = {}

    def install(self) -> None:
        """Take the signals again, inside the block: Lightning replaces the handler of SIGTERM while it sets up."""
        for s in self._before:
            signal.signal(s, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._seen += 1
        if self._seen > 1:
            os._exit(128 + signum)
        self._request_stop(signal.Signals(signum).name)
