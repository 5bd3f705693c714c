"""Toolbox: the tools of one attempt, called by the names a model gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from async_rl.environments.tool import CallOutcome, Tool, ToolResult
from async_rl.environments.tool_calls import MalformedCall, ToolCall


class Toolbox:
    """The tools of one attempt.

    Args:
        functions: The tools, of different names.
        timeout_s: Deadline of one call, > 0.
        max_calls: Most calls of one turn that are carried out; the model is told about the rest.

    Attributes:
        schemas: What the model is told about them.

    Raises:
        ValueError: a function can't be a tool, or two have the same name.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], timeout_s: float, max_calls: int = 16) -> None:
        tools = [Tool(function) for function in functions]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.name for tool in tools]
            raise ValueError(f"two tools are called {next(n for n in names if names.count(n) > 1)!r}; rename one")
        self._timeout_s = timeout_s
        self._max_calls = max_calls
        self.schemas: list[dict[str, Any]] = [tool.schema for tool in tools]

    async def run(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolResult]:
        """Carry out the calls of one turn at the same time; the results are in the order of the calls."""
        results = await asyncio.gather(*(self._run_one(call) for call in calls[: self._max_calls]))
        refused = len(calls) - len(results)
        text = f"Error: not called, more than {self._max_calls} calls in one turn"
        return [*results, *[ToolResult("", text, CallOutcome.ERROR)] * max(refused, 0)]

    async def _run_one(self, call: ToolCall | MalformedCall) -> ToolResult:
        if isinstance(call, MalformedCall):
            return ToolResult("", f"Error: {call.problem}", CallOutcome.ERROR)
        if call.name not in self._tools:
            known = ", ".join(self._tools) or "none"
            return ToolResult(call.name, f"Error: no tool {call.name!r}; tools: {known}", CallOutcome.ERROR)
        return await self._tools[call.name].call(call.arguments, self._timeout_s)
