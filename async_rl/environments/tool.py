"""Tool: a typed Python function that a model may call; whatever goes wrong in a call becomes text for the model."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from async_rl.environments.base import ToolError
from async_rl.environments.json_types import type_fault
from async_rl.environments.offload import call_user

log = logging.getLogger(__name__)

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_warned: set[str] = set()  # tools whose exception was logged once


class CallOutcome(StrEnum):
    """How a tool call ended."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model gets to read of a call.

    Attributes:
        name: The tool's name; empty where the call named none.
        text: The result, or ``"Error: ..."``.
        outcome: How the call ended.
    """

    name: str
    text: str
    outcome: CallOutcome

    @property
    def message(self) -> dict[str, str]:
        """The result as a chat message."""
        return {"role": "tool", "name": self.name, "content": self.text}


class Tool:
    """A function and the JSON schema of its parameters, made of its type hints and its Google-style docstring.

    Args:
        function: Plain or ``async``, with a docstring that describes it and every parameter, and a type hint on each.

    Attributes:
        name: The function's name.
        schema: As chat templates take it.

    Raises:
        ValueError: no schema can be made of the function; the message says what is missing.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        from transformers.utils import get_json_schema

        if not callable(function):
            raise ValueError(f"tool {function!r} cannot be called; give a function with type hints and a docstring")
        self.name: str = getattr(function, "__name__", "") or type(function).__name__
        try:
            unnamed = [p for p in inspect.signature(function).parameters.values() if p.kind not in _BY_NAME]
            if unnamed:
                raise TypeError(f"a model passes arguments by name, which {unnamed[0]} does not take")
            self.schema: dict[str, Any] = get_json_schema(function)
        except Exception as error:  # transformers raises several kinds, some of them plain Exceptions
            raise ValueError(
                f"tool {self.name}: {error}. A tool is a function with a type hint on every parameter and a docstring "
                "that describes it and, under Args:, each parameter"
            ) from error
        self.schema["function"].pop("return", None)  # costs tokens and tells the model nothing
        self._parameters: Mapping[str, Any] = self.schema["function"]["parameters"]
        self._function = function

    def fault_of(self, arguments: Mapping[str, Any]) -> str:
        """What is wrong with the arguments of a call, or ``""``."""
        properties = self._parameters["properties"]
        if unknown := sorted(set(arguments) - set(properties)):
            return f"{self.name} has no argument {unknown[0]!r}; its arguments are {', '.join(properties) or 'none'}"
        if missing := [name for name in self._parameters.get("required", ()) if name not in arguments]:
            return f"{self.name} needs the argument {missing[0]!r}"
        faults = (type_fault(value, properties[name]) for name, value in arguments.items())
        for name, fault in zip(arguments, faults, strict=True):
            if fault:
                return f"{self.name}: the argument {name!r} must be {fault}, got {json.dumps(arguments[name])[:100]}"
        return ""

    async def call(self, arguments: Mapping[str, Any], timeout_s: float) -> ToolResult:
        """Call the function off the event loop, or on it where it is ``async``.

        Args:
            arguments: By name, as the model wrote them; checked here.
            timeout_s: Deadline, > 0. A blocking function that passes it ends by itself; its result is thrown away.

        Returns:
            The result, or the error as text: nothing is raised but the cancellation of the attempt.
        """
        if fault := self.fault_of(arguments):
            return self._error(fault)
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                value = await call_user(functools.partial(self._function, **arguments))
                return ToolResult(self.name, as_text(value), CallOutcome.OK)
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) and task.cancelling():  # the attempt is over
                raise
            return self._raised(error)  # the tool cancelled something of its own
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # the last two would end the event loop
            if isinstance(error, TimeoutError) and deadline.expired():
                text = f"Error: {self.name} took more than {timeout_s:g} s"
                return ToolResult(self.name, text, CallOutcome.TIMEOUT)
            return self._raised(error)

    def _raised(self, error: BaseException) -> ToolResult:
        if isinstance(error, ToolError):
            return self._error(str(error))
        if self.name not in _warned:
            _warned.add(self.name)
            log.warning(
                "tool %s raised %r; the model is told, and the metric tool_errors counts it (shown once per tool)",
                self.name,
                error,
                exc_info=error,
            )
        return self._error(f"{type(error).__name__}: {error}")

    def _error(self, text: str) -> ToolResult:
        return ToolResult(self.name, f"Error: {text}", CallOutcome.ERROR)


def as_text(value: Any) -> str:
    """A tool's result for the model: strings as they are, everything else as JSON where it can be."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
