"""StopSignals: the first SIGINT or SIGTERM asks the run to stop, the second ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def stop_signals(request_stop: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Route SIGINT and SIGTERM to ``request_stop`` for the duration of the block (main thread only).

    Engine processes end with this one, so the hard exit on a second signal leaves nothing behind.

    Args:
        request_stop: Called with the signal's name, from the signal handler: it may only set flags.

    Yields:
        A function that installs the handlers again; Lightning replaces SIGTERM's while it sets up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    seen = 0

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            os._exit(128 + signum)
        request_stop(signal.Signals(signum).name)

    before = {s: signal.getsignal(s) for s in _SIGNALS}

    def install() -> None:
        for s in _SIGNALS:
            signal.signal(s, handle)

    install()
    try:
        yield install
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
