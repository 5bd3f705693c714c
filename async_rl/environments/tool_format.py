"""ToolFormat: how a chat template is told about tools, and how the calls of its model are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from async_rl.environments.tool_calls import CallParser, ToolCall, hermes_calls, hermes_text, json_calls

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message]], str]

_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

_NAME, _MARK = "probe_tool", "probe7f3a"
_USER: Message = {"role": "user", "content": "hi"}
_SAID: Message = {"role": "assistant", "content": _MARK}
_TOOL: Message = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Tells the time.",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string", "description": "Where."}}},
    },
}
_CALL = ToolCall(_NAME, {"zone": "here"})


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """What one chat template does with tools, found out by rendering examples.

    Attributes:
        native: The template takes the tools itself; otherwise they are put into the system message.
        has_system: It renders system messages; otherwise the tools go before the first user message.
        has_results: It renders messages of the role ``tool``; otherwise results become a user message.
        parse: Reads the calls of a turn.
        write: A turn that is nothing but this call.
    """

    native: bool
    has_system: bool
    has_results: bool
    parse: CallParser
    write: Callable[[ToolCall], str]

    @staticmethod
    def of(render: Render, reads_responses: bool = False) -> ToolFormat:
        """Find out the format of a template.

        Args:
            render: Messages and tools to text, with what opens the next turn; raises where it can't.
            reads_responses: The tokenizer reads calls by itself (``response_template``).

        Raises:
            ValueError: the template takes tools, but writes calls in a way we can't read.
        """
        native = _NAME in _try(render, [_USER], [_TOOL])
        result = {"role": "tool", "name": _NAME, "content": _MARK}
        return ToolFormat(
            native=native,
            has_system=_MARK in _try(render, [{"role": "system", "content": _MARK}, _USER]),
            has_results=_MARK in _try(render, [_USER, {"role": "assistant", "content": "ok"}, result]),
            parse=_parser_of(render) if native and not reads_responses else hermes_calls,
            write=partial(_written, render) if native else hermes_text,
        )

    def fit(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
        """The conversation and tools as the template takes them."""
        if not self.has_results:
            messages = _results_from_user(messages)
        if self.native:
            return messages, tools
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return _introduced(messages, _INSTRUCTIONS.format(tools=listed), self.has_system), ()


def _try(render: Render, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
    """The rendered text, "" where the template refuses."""
    try:
        return render(messages, tools)
    except Exception:
        return ""


def _written(render: Render, call: ToolCall) -> str:
    """A turn that is nothing but this call, as a template that takes tools writes it."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    calling: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    opened, called = (_try(render, messages, [_TOOL]) for messages in ([_USER], [_USER, calling]))
    closing = _try(render, [_USER, _SAID], [_TOOL]).rpartition(_MARK)[2]
    same = next((i for i, (a, b) in enumerate(zip(opened, called, strict=False)) if a != b), len(opened))
    return called[same:].removesuffix(closing)


def _parser_of(render: Render) -> CallParser:
    """The parser that reads a call as the template itself writes it."""
    written = _written(render, _CALL)
    for parse in (hermes_calls, json_calls):
        if parse(written) == [_CALL]:
            return parse
    raise ValueError(
        f"takes tools, but renders a call as {written[:200]!r}, which is neither Hermes' <tool_call> nor Llama 3's "
        "JSON; give the tokenizer a response_template (see parse_response of transformers), or a template that "
        "leaves tools out, to have them described in the system message"
    )


def _introduced(messages: Sequence[Message], text: str, has_system: bool) -> list[Message]:
    """The conversation with ``text`` in its system message, or before its first message where there can't be one."""
    system = [m for m in messages[:1] if m["role"] == "system"]
    rest = messages[len(system) :]
    before = "\n\n".join([*(str(m["content"]) for m in system), text])
    if has_system or not rest:
        return [{"role": "system", "content": before}, *rest]
    return [{**rest[0], "content": f"{before}\n\n{rest[0]['content']}"}, *rest[1:]]


def _results_from_user(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the tool results of each turn as one user message."""
    fitted: list[Message] = []
    before = ""
    for message in messages:
        role = message["role"]
        if role != "tool":
            fitted.append(message)
        else:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if before == "tool":
                fitted[-1] = {"role": "user", "content": f"{fitted[-1]['content']}\n{text}"}
            else:
                fitted.append({"role": "user", "content": text})
        before = role
    return fitted
