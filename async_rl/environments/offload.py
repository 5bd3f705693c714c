"""Runs user code that may block or hang off the event loop, in daemon threads that can't hold up the exit."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def call_user(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of any kind (sync, async, partial, callable object) and return its result.

    ``async`` functions run on the current loop; everything else in a thread of its own. Not in an executor: executor
    threads are joined when the interpreter exits, so one hanging reward would keep the run from ever ending.

    Cancelling the awaiting task leaves a blocking call to finish by itself; its result is thrown away.
    """
    if is_async(function):
        return await function(*args)
    result = await _in_daemon_thread(function, args)
    return await result if inspect.isawaitable(result) else result


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` gives a coroutine, seen through partials and ``__call__``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def _in_daemon_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: Any, error: BaseException | None) -> None:
        if outcome.done():  # cancelled meanwhile
            return
        if error is None:
            outcome.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            outcome.set_exception(error)
        else:  # sys.exit() and the like must fail this attempt, not the event loop; futures refuse StopIteration
            wrapped = RuntimeError(f"{function!r} raised {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            outcome.set_exception(wrapped)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function, *args)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, name=f"user-{getattr(function, '__name__', 'code')}", daemon=True).start()
    return await outcome
