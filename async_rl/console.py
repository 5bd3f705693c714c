"""What a run prints: our messages, on the error stream and in run.log, and the error that ended it."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_rl.shutdown import is_user_code
from async_rl.types import RunError

log = logging.getLogger("async_rl")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def messages(file: Path) -> Iterator[None]:
    """Our messages on the error stream and in a file."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    console, to_file = _Console(), _RunLog(file)
    console.setFormatter(_Plain())
    console.setLevel(logging.INFO)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for handler in (console, to_file):
        log.addHandler(handler)
    before = log.level, log.propagate
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield
    finally:
        log.setLevel(before[0])
        log.propagate = before[1]
        for handler in (console, to_file):
            log.removeHandler(handler)
            handler.close()


def first_line(error: BaseException | None) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stderr`` is at the moment: the live progress line replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


class _RunLog(logging.FileHandler):
    """Says once that the file can't be written, instead of a traceback per message."""

    _failing = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        if not self._failing:
            print(f"WARNING: {self.baseFilename} can't be written: {sys.exc_info()[1]}", file=sys.stderr)
        self._failing = True


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname}: {text}"


def print_error(error: Exception) -> str:
    """Print an error: a whole traceback, or where our message says it all only that of the user's code behind it.

    Returns:
        The error in one line.
    """
    log.debug("the run failed", exc_info=error)
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, RunError):
        if error.__cause__ is not None:
            print(_users_traceback(error.__cause__), end="", file=sys.stderr)
        print(f"error: {what}", file=sys.stderr)
    elif isinstance(error, OSError) and error.errno in _DISK_FULL:
        print(
            f"error: the disk is full: {error}. What was written is kept: make room, then resume=true", file=sys.stderr
        )
    else:
        traceback.print_exception(error)
    return what


def _users_traceback(error: BaseException) -> str:
    """The traceback of an error from the first line of the user's own code on; empty where none was running."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if is_user_code(frame.filename)), None)
    if first is None:
        return ""
    lines = ["Traceback (your code; all of it is in run.log):\n", *traceback.format_list(frames[first:])]
    return "".join(lines + traceback.format_exception_only(error))
