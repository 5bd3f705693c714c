"""How templates of each family are told about tools, and how calls are read: Hermes, Llama 3, response templates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from template_families import FAMILIES, LLAMA3, QWEN2_5
from transformers.utils import get_json_schema

from async_rl.environments import ChatTemplate, TemplateError
from async_rl.environments.template import end_of
from async_rl.environments.tool_calls import MalformedCall, ToolCall, hermes_calls, json_calls


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One number.
        b: The other.
    """
    return a + b


TOOLS = [get_json_schema(add)]
ASK = [{"role": "user", "content": "3 + 4?"}]
CALL = ToolCall("add", {"a": 3, "b": 4})
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
JSON = '{"name": "add", "parameters": {"a": 3, "b": 4}}'


def read(template: ChatTemplate, text: str, tools: Any = TOOLS) -> tuple[Any, ...]:
    tokenizer = template._tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False)
    return template.read(template.render(ASK, tools), ids, template.decode(ids), tools).calls


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("chatml", HERMES),
        ("qwen2.5", HERMES),
        ("qwen3", HERMES),
        ("llama3", JSON),
        ("gemma", HERMES),
        ("mistral", HERMES),
    ],
)
def test_every_family_is_told_about_the_tools_and_its_calls_are_read(name: str, call: str) -> None:
    family = FAMILIES[name]
    template = ChatTemplate(family.tokenizer())
    text = template.render(ASK, TOOLS)
    assert '"add"' in text
    assert '"One number."' in text
    assert "3 + 4?" in text
    assert text.count("function signatures within") == (name != "llama3"), "described once, by the template or by us"
    assert read(template, call + family.end) == (CALL,)
    assert read(template, "It is 7." + family.end) == ()
    assert read(template, call + family.end, tools=()) == (), "no tools offered, no calls"
    assert "signatures" not in template.render(ASK)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_written_for_a_family_is_read_back(name: str) -> None:
    call = ToolCall("add", {"a": 3, "b": [1, "zwölf </tool> 'x'"]})
    template = ChatTemplate(FAMILIES[name].tokenizer())
    text = template.write(call)
    assert read(template, text + FAMILIES[name].end) == (call,)
    assert ("<tool_call>" in text) == (name != "llama3")
    prompt, calling = template.render(ASK, TOOLS), {"role": "assistant", "content": text}
    whole = template.render([*ASK, calling], TOOLS)
    assert whole.startswith(prompt)
    assert end_of(text, whole[len(prompt) :]) is not None, "a turn as the template would render it"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gets_to_read_results(name: str) -> None:
    template = ChatTemplate(FAMILIES[name].tokenizer())
    results = [{"role": "tool", "name": "add", "content": text} for text in ("seven", "eight")]
    said = {"role": "assistant", "content": "calls"}
    text = template.render([*ASK, said, *results, said, *results[:1]], TOOLS)
    assert text.count("seven") == 2
    assert text.index("seven") < text.index("eight") < text.rindex("seven")
    if not FAMILIES[name].tool_role:
        joined = "<tool_response>\nseven\n</tool_response>\n<tool_response>\neight\n</tool_response>"
        assert joined in text, "one user message per turn: roles alternate"


@pytest.mark.parametrize("name", ["chatml", "gemma"])
def test_the_users_own_system_message_stays(name: str) -> None:
    template = ChatTemplate(FAMILIES[name].tokenizer())
    text = template.render([{"role": "system", "content": "Be brief."}, *ASK], TOOLS)
    assert text.index("Be brief.") < text.index("# Tools") < text.index("3 + 4?")


def test_a_template_with_calls_we_cannot_read_is_refused_with_the_fix() -> None:
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    tokenizer.chat_template = QWEN2_5.replace('<tool_call>\\n{"name": "', "[CALL ")
    with pytest.raises(
        TemplateError, match=r"qwen2\.5-test' takes tools, but renders a call as '\[CALL.*response_template"
    ):
        ChatTemplate(tokenizer).render(ASK, TOOLS)


RESPONSES = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "[CALL ",
            "close": " LLAC]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
CALLING = '[CALL {"name": "add", "arguments": {"a": 3, "b": 4}} LLAC]'


def responding_tokenizer() -> Any:
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    tokenizer.chat_template = QWEN2_5.replace("'<tool_call>\\n{", "'[CALL {").replace("'}\\n</tool_call>'", "'} LLAC]'")
    tokenizer.response_template = RESPONSES
    return tokenizer


def test_the_tokenizers_own_response_parser_reads_calls() -> None:
    template = ChatTemplate(responding_tokenizer())
    assert read(template, CALLING + "<|im_end|>") == (CALL,)
    assert read(template, "It is 7.<|im_end|>") == ()
    (bad,) = read(template, "[CALL {oops LLAC]<|im_end|>")
    assert isinstance(bad, MalformedCall)


def test_a_call_is_written_as_the_template_of_such_a_tokenizer_writes_it() -> None:
    assert ChatTemplate(responding_tokenizer()).write(CALL) == CALLING


def test_a_parsed_turn_is_continued_as_the_template_renders_it() -> None:
    tokenizer = responding_tokenizer()
    template = ChatTemplate(tokenizer)
    ids = tokenizer.encode(CALLING + "<|im_end|>", add_special_tokens=False)
    prompt = template.render(ASK, TOOLS)
    turn = template.read(prompt, ids, template.decode(ids), TOOLS)
    assert turn.message["tool_calls"][0]["function"]["name"] == "add"
    messages = [*ASK, turn.message, {"role": "tool", "content": "7"}]
    whole, new = template.continuation(prompt, turn.rendered, ids[-1], messages, TOOLS)
    assert (
        tokenizer.decode(new)
        == "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert whole == prompt + CALLING + "<|im_end|>" + tokenizer.decode(new)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call", []),
        (f"first {HERMES} then {HERMES}", [CALL, CALL]),
        (HERMES.removesuffix("\n</tool_call>"), [CALL]),  # cut off right behind the JSON
        ('<tool_call>{"name": "add"}</tool_call>', [ToolCall("add", {})]),
        ('<tool_call>{"name": "add", "arguments": null}</tool_call>', [ToolCall("add", {})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 3, \\"b\\": 4}"}</tool_call>', [CALL]),
        (f"<think>maybe {HERMES}</think>no", []),
        (f"<think>maybe {HERMES}", []),
        (f"<think>yes</think>{HERMES}", [CALL]),
    ],
)
def test_hermes_calls(text: str, expected: list[Any]) -> None:
    assert hermes_calls(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "add", "argum', "not valid JSON"),
        ("<tool_call>add(3, 4)</tool_call>", "not valid JSON"),
        ("<tool_call>[]</tool_call>", 'an object with a "name"'),
        ('<tool_call>{"arguments": {}}</tool_call>', 'an object with a "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'an object with a "name"'),
        ('<tool_call>{"name": "add", "arguments": [3, 4]}</tool_call>', "arguments of add must be an object"),
        ('<tool_call>{"name": "add", "arguments": "3"}</tool_call>', "arguments of add must be an object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "arguments of add are not valid JSON"),
        ("<tool_call>" + "[" * 100_000, "nested too deeply"),
    ],
)
def test_calls_that_cannot_be_read_say_why(text: str, problem: str) -> None:
    (call,) = hermes_calls(text)
    assert isinstance(call, MalformedCall)
    assert problem in call.problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (JSON, [CALL]),
        (f" <|python_tag|>{JSON}\n", [CALL]),
        (f"{JSON}; {JSON}", [CALL, CALL]),
        ("7", []),
        ("[1]", []),
        ('{"answer": 7}', []),
        (f"The call is {JSON}", []),
        (f"{JSON} and so on", [MalformedCall]),
        ('{"name": "add", "par', [MalformedCall]),
    ],
)
def test_llama_calls(text: str, expected: list[Any]) -> None:
    assert [c if isinstance(c, ToolCall) else type(c) for c in json_calls(text)] == expected
    assert "parameters" in LLAMA3


@given(st.text(alphabet=st.sampled_from('{}[]",:;<>/ntool_call ae3'), max_size=60))
def test_nothing_a_model_writes_makes_a_parser_raise(text: str) -> None:
    for made in (text, f"<tool_call>{text}", f'<tool_call>{{"name": "x", "arguments": {text}}}</tool_call>'):
        hermes_calls(made)
        json_calls(made)


@given(st.dictionaries(st.text(max_size=5), st.recursive(st.integers() | st.text(max_size=5), st.lists, max_leaves=5)))
def test_arguments_survive(arguments: dict[str, Any]) -> None:
    call = json.dumps({"name": "f", "arguments": arguments})
    if "<" not in call:
        assert hermes_calls(f"<tool_call>\n{call}\n</tool_call>") == [ToolCall("f", arguments)]
    assert json_calls(call) == [ToolCall("f", arguments)] or "think>" in call
