"""StopSignals: the first SIGINT or SIGTERM asks the run to stop, the second ends the process at once; each says so."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_WORDS_S = 1.0
_CLEAR_LINE = "\r\x1b[2K"
_SHOW_CURSOR = "\x1b[?25h"


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

    Engine processes end with this one, so the hard exit on a second signal leaves nothing behind. A third one, while
    ``before_exit`` takes its second, is the system's.

    Args:
        request_stop: Called with the signal's name, from the signal handler: it may only set flags.
        before_exit: Called with the reason and the exit code before the process is ended by a second signal; one second
            is waited for them, in all.
    """

    def __init__(
        self, request_stop: Callable[[str], None], before_exit: Iterable[Callable[[str, int], None]] = ()
    ) -> None:
        self._request_stop = request_stop
        self._before_exit = before_exit
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

    @property
    def received(self) -> bool:
        """Whether a signal came since the block was entered."""
        return self._seen > 0

    def install(self) -> None:
        """Take the signals again, inside the block: Lightning replaces the handler of SIGTERM while it sets up."""
        for s in self._before:
            signal.signal(s, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        name = signal.Signals(signum).name
        self._seen += 1
        if self._seen == 1:
            _say(f"{name}: finishing and saving; again = stop at once (nothing more is saved)")
            self._request_stop(name)
            return
        try:
            for s in _SIGNALS:
                signal.signal(s, signal.SIG_DFL)
            _say(f"{name} again: stopped at once", on_terminal=_CLEAR_LINE + _SHOW_CURSOR)
            # On a thread, for what was interrupted may hold a lock they need, and a disk may hang.
            reason = f"stopped at once by a second {name}", 128 + signum
            words = threading.Thread(target=self._last_words, args=reason, name="last-words", daemon=True)
            words.start()
            words.join(_LAST_WORDS_S)
        finally:
            os._exit(128 + signum)

    def _last_words(self, reason: str, exit_code: int) -> None:
        for call in self._before_exit:
            with contextlib.suppress(Exception):
                call(reason, exit_code)


def _say(text: str, on_terminal: str = _CLEAR_LINE) -> None:
    """Print a line from a signal handler: past the streams, which may be in the middle of a write.

    On a terminal the cursor is behind the live line, which hides it, and behind a ``^C``.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{on_terminal if os.isatty(2) else ''}{text}\n".encode())
