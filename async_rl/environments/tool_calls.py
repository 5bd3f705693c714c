"""Finds the tool calls in what a model wrote. Reads JSON and nothing else: no text of a model is ever evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call a model asked for.

    Attributes:
        name: The tool's name; there may be no such tool.
        arguments: By name, not checked yet.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What was meant as a call but can't be read; ``problem`` is for the model to read."""

    problem: str


CallParser = Callable[[str], list[ToolCall | MalformedCall]]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()


def hermes_calls(text: str) -> list[ToolCall | MalformedCall]:
    """Calls as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen), in order."""
    return [_read(part.split(_CLOSE)[0]) for part in _said(text).split(_OPEN)[1:]]


def hermes_text(call: ToolCall) -> str:
    """A call as :func:`hermes_calls` reads it."""
    return _OPEN + json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False) + _CLOSE


def json_calls(text: str) -> list[ToolCall | MalformedCall]:
    """Calls as a turn that is nothing but ``{"name": ..., "parameters": {...}}`` (Llama 3), several split by ``;``.

    A turn that isn't such an object is an answer: in this format nothing else marks a call.
    """
    said = _said(text).strip().removeprefix("<|python_tag|>").strip()
    objects = _objects(said)
    if objects and all("name" in value for value in objects):
        return [_read_object(value) for value in objects]
    return [_read(said)] if not objects and said.startswith('{"name"') else []


def message_calls(message: Mapping[str, Any]) -> list[ToolCall | MalformedCall]:
    """Calls of an assistant message as ``tokenizer.parse_response`` returns it."""
    calls = message.get("tool_calls") or ()
    return [_read_object(c.get("function", c) if isinstance(c, Mapping) else c) for c in calls]


def _said(text: str) -> str:
    """The turn without its thinking: what a model only considers is no call."""
    said = text.rpartition("</think>")[2]
    return said.partition("<think>")[0]


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects a text consists of; none where it holds anything else."""
    found: list[dict[str, Any]] = []
    at = 0
    while at < len(text):
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        if not isinstance(value, dict):
            return []
        found.append(value)
        at = len(text) - len(text[at:].lstrip("; \n"))
    return found


def _read(text: str) -> ToolCall | MalformedCall:
    try:
        return _read_object(json.loads(text))
    except RecursionError:
        return MalformedCall("the tool call is nested too deeply")
    except ValueError as error:
        return MalformedCall(f'the tool call is not valid JSON ({error}); write {{"name": ..., "arguments": {{...}}}}')


def _read_object(value: Any) -> ToolCall | MalformedCall:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return MalformedCall('a tool call is an object with a "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models put the JSON into a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return MalformedCall(f"the arguments of {value['name']} are not valid JSON")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return MalformedCall(f"the arguments of {value['name']} must be an object")
    return ToolCall(value["name"], arguments)
