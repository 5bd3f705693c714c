"""describe_threads: where every thread of the process is, and every asyncio task of the event loops they run."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterable
from types import FrameType
from typing import Any

_NAMES_SHOWN = 5


def describe_threads() -> str:
    """Stacks of all threads, then those of all tasks; equal ones once, with the names of who is there.

    Only looks, from any thread, and takes no lock: for a process that hangs.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {names.get(ident, f"thread {ident}"): frame for ident, frame in sys._current_frames().items()}
    stacks = _grouped((name, "".join(traceback.format_stack(frame))) for name, frame in frames.items())
    parts = [f"--- {len(frames)} threads", *(_entry("thread", *group) for group in stacks)]
    for name, frame in frames.items():
        if (loop := _loop_of(frame)) is not None:
            tasks = asyncio.all_tasks(loop)
            parts.append(f"--- {len(tasks)} asyncio tasks in thread {name}")
            parts += [_entry("task", *group) for group in _grouped((t.get_name(), _task_stack(t)) for t in tasks)]
    return "\n".join(parts)


def _grouped(named_stacks: Iterable[tuple[str, str]]) -> list[tuple[list[str], str]]:
    """Names by stack, the rarest first: what hangs is seldom what most are doing."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, stack in named_stacks:
        groups[stack].append(name)
    return sorted(((names, stack) for stack, names in groups.items()), key=lambda group: len(group[0]))


def _entry(kind: str, names: list[str], stack: str) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{kind} {', '.join(sorted(names)[:_NAMES_SHOWN])}{more}:\n{stack}"


def _loop_of(frame: FrameType | None) -> asyncio.AbstractEventLoop | None:
    """The event loop whose ``run_forever`` is on this stack."""
    while frame is not None:
        if frame.f_code.co_name == "run_forever":
            loop = frame.f_locals.get("self")
            return loop if isinstance(loop, asyncio.AbstractEventLoop) else None
        frame = frame.f_back
    return None


def _task_stack(task: asyncio.Task[Any]) -> str:
    """Where a task waits, from its own coroutine to the innermost one it awaits."""
    lines = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = _first(awaited, "cr_frame", "gi_frame", "ag_frame")
        if frame is None:
            break
        lines += traceback.format_list(traceback.StackSummary.extract([(frame, frame.f_lineno)]))
        awaited = _first(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    return "".join(lines)


def _first(thing: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(thing, name, None)) is not None), None)
