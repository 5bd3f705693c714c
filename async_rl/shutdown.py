"""ShutdownDeadline: the end of a run takes so many seconds at most, then the process is ended."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import faulthandler
import logging
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import FrameType

log = logging.getLogger(__name__)

_OURS = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_AFTER_S = 2.0  # the second line of defence waits so much longer than the first


class ShutdownDeadline:
    """Watches the end of a run and ends the process with exit code 1 where it takes too long.

    What may hold it up: a callback that hangs, a thread that does not obey, an engine that will not close. Exiting is
    safe at any moment: the record is on the disk, checkpoints are complete or absent, engine processes end with this
    one. The watch is a thread; should somebody's C code keep the interpreter lock, the C timer of ``faulthandler``
    ends the process two seconds later, with the stacks of all threads.

    Args:
        timeout_s: Most seconds from :meth:`start` to :meth:`end`; ``math.inf``: no bound.

    Attributes:
        before_exit: Called with the reason and the exit code, before the process is ended.
    """

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"shutdown_timeout_s={timeout_s} must be > 0")
        self.timeout_s = timeout_s
        self.before_exit: list[Callable[[str, int], None]] = []
        self._changed = threading.Condition()
        self._deadline_s = math.inf
        self._running = False
        self._owner = threading.main_thread()

    @property
    def remaining_s(self) -> float:
        """Seconds left; all of them before :meth:`start`."""
        return max(self._deadline_s - time.monotonic(), 0.0) if self._running else self.timeout_s

    def start(self, owner: threading.Thread | None = None) -> None:
        """The end of the run begins. Calling it again changes nothing.

        Args:
            owner: The thread that has to come to the end; default: this one.
        """
        with self._changed:
            if self._running or math.isinf(self.timeout_s):
                return
            self._running = True
            self._owner = owner or threading.current_thread()
            self._deadline_s = time.monotonic() + self.timeout_s
        self._arm()
        threading.Thread(target=self._watch, name="shutdown-deadline", daemon=True).start()

    @contextlib.contextmanager
    def extended(self, timeout_s: float) -> Iterator[None]:
        """What is done inside does not count: it has a time of its own. Before :meth:`start` it has any.

        Args:
            timeout_s: Most seconds it may take, > 0.
        """
        began_s, running, before_s = time.monotonic(), self._running, self._deadline_s
        if running:
            self._move_deadline(began_s + timeout_s)
        try:
            yield
        finally:
            if running:
                self._move_deadline(before_s + time.monotonic() - began_s)

    def end(self) -> None:
        """The run has ended."""
        with self._changed:
            if not self._running:
                return
            self._running = False
            self._changed.notify_all()
        faulthandler.cancel_dump_traceback_later()

    def _move_deadline(self, deadline_s: float) -> None:
        with self._changed:
            self._deadline_s = deadline_s
            self._changed.notify_all()
        self._arm()

    def _arm(self) -> None:
        # Without an error stream, or with a timeout of centuries, there is no second line of defence.
        with contextlib.suppress(ValueError, OSError, AttributeError, OverflowError):
            faulthandler.dump_traceback_later(self.remaining_s + _AFTER_S, exit=True, file=sys.__stderr__)  # type: ignore[arg-type]

    def _watch(self) -> None:
        with self._changed:
            while self._running and self.remaining_s > 0:
                self._changed.wait(min(self.remaining_s, 1.0))
            if not self._running:
                return
        end_process(f"{self._owner.name} is {whereabouts(self._owner)}", 1, self.before_exit)


def leave_behind(before: Collection[threading.Thread], exit_code: int, timeout_s: float) -> None:
    """Keep threads from holding up the interpreter's exit, which waits without bound for some: an executor's, for one.

    Once the interpreter wants to exit they get ``timeout_s`` together, then the process ends with ``exit_code``.

    Args:
        before: Threads that are somebody else's business.
        exit_code: Not 0.
        timeout_s: Seconds.
    """
    threads = [t for t in threading.enumerate() if t not in before and _holds_up_exit(t)]
    if not threads:
        return
    exiting = threading.Event()
    # The hook that executors join their threads in; atexit's come after it. What is registered last is run first.
    threading._register_atexit(exiting.set)  # type: ignore[attr-defined]

    def watch() -> None:
        exiting.wait()
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        if alive := [thread for thread in threads if thread.is_alive()]:
            what = ", ".join(f"thread {thread.name} is {whereabouts(thread)}" for thread in alive[:4])
            end_process(what, exit_code, ())

    threading.Thread(target=watch, name="exit-deadline", daemon=True).start()


def _holds_up_exit(thread: threading.Thread) -> bool:
    return not thread.daemon or thread in concurrent.futures.thread._threads_queues


def end_process(what: str, exit_code: int, before_exit: Iterable[Callable[[str, int], None]]) -> None:
    """End the process now, saying why; nothing that waits is waited for."""
    try:
        log.error("the process would not end: %s; ending it with exit code %d", what, exit_code)
        for call in before_exit:
            call(f"forced: {what}", exit_code)
        for handler in logging.getLogger("async_rl").handlers:
            handler.flush()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(exit_code)


def whereabouts(thread: threading.Thread) -> str:
    """Where a thread is, in somebody's own code if it is in any: ``in on_train_end at my_callback.py:12``."""
    frames = []
    frame: FrameType | None = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    if not frames:
        return "ended"
    own = next((f for f in frames if is_user_code(f.f_code.co_filename)), None)
    at = own or next((f for f in frames if f.f_code.co_filename.startswith(_OURS)), frames[0])
    return f"in {at.f_code.co_name} at {at.f_code.co_filename}:{at.f_lineno}"


def is_user_code(filename: str) -> bool:
    """Whether a file is neither ours nor the standard library's nor an installed package's."""
    return not filename.startswith((_OURS, "<", *_LIBRARIES)) and "site-packages" not in filename
