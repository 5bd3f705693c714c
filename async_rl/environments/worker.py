"""WorkerProcess: calls functions in a process of their own that is killed when it takes too long."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import time
import weakref
from typing import Any

from async_rl.environments.base import RewardError, RewardTimeoutError, shorten

_START_TIMEOUT_S = 120.0


class WorkerProcess:
    """A pool of child processes for reward code that may hang, eat memory or crash; for any thread.

    A call past its deadline has its process killed: Python can't end a thread, and some hanging code (a power of huge
    numbers) doesn't even let other threads run. A process is started when it is first needed and again after a kill;
    it ends when this object does, when the run does, and within a second of the run's own process being killed.

    Args:
        module: The module whose functions may be called; arguments and results are JSON.
        timeout_s: Deadline of one call in seconds, > 0; starting a process does not count.
        processes: Calls that may run at once, >= 1.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(self, module: str, *, timeout_s: float = 5.0, processes: int = 1) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be > 0")
        if processes < 1:
            raise ValueError(f"processes={processes} must be >= 1")
        self._timeout_s = timeout_s
        self._idle: queue.LifoQueue[_Child] = queue.LifoQueue()
        children = [_Child(module) for _ in range(processes)]
        for child in children:
            self._idle.put(child)
        self._finalizer = weakref.finalize(self, _kill_all, children)  # at the interpreter's exit, too

    def call(self, function: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a function of the module; blocks, so it belongs off the event loop (``call_user``).

        Args:
            function: Its name.
            *arguments: What to call it with.
            timeout_s: Another deadline for this call.

        Raises:
            RewardTimeoutError: it took longer than ``timeout_s``; its process was killed.
            RewardError: it raised, or its process died; the message shows the arguments.
        """
        child = self._idle.get()
        try:
            return child.call(function, arguments, timeout_s or self._timeout_s)
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """Kill the processes; a later call starts new ones."""
        with contextlib.ExitStack() as put_back:
            for _ in range(self._idle.qsize()):
                child = self._idle.get()
                put_back.callback(self._idle.put, child)
                child.kill()


class _Child:
    """One child process, started on demand. For one thread at a time."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, function: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        process = self._running()
        request = {"function": function, "arguments": arguments, "timeout_s": timeout_s}
        try:
            reply = _exchange(process, request, timeout_s)
        except TimeoutError:
            self.kill()
            raise RewardTimeoutError(
                f"{function} took more than {timeout_s:g} s for {shorten(arguments)}; its process was killed"
            ) from None
        except BaseException:
            self.kill()
            raise
        if reply is None:
            code = process.wait()
            self.kill()
            # The child lets the kernel end it a little after the deadline, should nobody else.
            kind = RewardTimeoutError if code == -14 else RewardError
            raise kind(f"the process of {function} died (exit code {code}) on {shorten(arguments)}")
        if "error" in reply:
            raise RewardError(f"{function} raised {reply['error']} for {shorten(arguments)}")
        return reply["value"]

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.kill()
        if self._process is None:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "async_rl.environments.worker_child", self._module, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONHASHSEED": "0"},  # the order of sets is the same in every process and run
                start_new_session=True,  # Ctrl-C is the run's to handle
            )
            try:
                ready = _exchange(process, None, _START_TIMEOUT_S)
            except BaseException:
                self.kill()
                raise
            if ready is None or "error" in ready:
                self.kill()
                why = "it died while starting, see its output" if ready is None else ready["error"]
                raise RewardError(f"the process of {self._module} cannot start: {why}")
        return self._process


def _exchange(process: subprocess.Popen[bytes], request: Any, timeout_s: float) -> dict[str, Any] | None:
    """Send a line and wait for one; ``None`` when the process is gone.

    Raises:
        TimeoutError: no line within ``timeout_s`` seconds.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    deadline_s = time.monotonic() + timeout_s
    if request is not None:
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
    received = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            if not selector.select(max(deadline_s - time.monotonic(), 0.0)):
                raise TimeoutError
            if not (chunk := os.read(process.stdout.fileno(), 1 << 16)):
                return None
            received += chunk
    reply: dict[str, Any] = json.loads(received)
    return reply


def _kill_all(children: list[_Child]) -> None:
    for child in children:
        child.kill()
