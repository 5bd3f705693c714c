"""Chat on the templates of real model families: token-in token-out, the loss mask, rewritten turns, splits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_families import FAMILIES, QWEN3, Family

from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments import (
    BudgetLimits,
    Chat,
    ChatTemplate,
    ContextFullError,
    TemplateError,
    TemplateRewriteError,
)
from async_rl.types import Segment

FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def engine_of(*turns: list[int]) -> ScriptedEngine:
    replies = iter(turns)
    engine = ScriptedEngine(lambda prompt, seed: next(replies), logprob=-0.5)
    asyncio.run(engine.load_weights(0, None))  # type: ignore[arg-type]
    return engine


def make_chat(tokenizer: Any, engine: ScriptedEngine, max_tokens: int = 100, **kwargs: Any) -> Chat:
    return Chat(engine, ChatTemplate(tokenizer), SamplingParams(max_tokens=max_tokens), seed=1, **kwargs)


def talk(chat: Chat, *turns: Any) -> Chat:
    async def go() -> None:
        for messages in turns:
            await chat.generate(messages)

    asyncio.run(go())
    return chat


def check(chat: Chat, engine: ScriptedEngine, sampled: list[list[int]]) -> None:
    """What holds for every conversation: mask, log-probabilities, segments and requests agree with what was sampled."""
    assert [t for t, m in zip(chat.token_ids, chat.loss_mask, strict=True) if m] == [
        t for turn in sampled for t in turn
    ]
    assert [chat.token_ids[s.start : s.end] for s in chat.segments] == sampled
    assert chat.logprobs == [-0.5 if m else 0.0 for m in chat.loss_mask]
    for request, segment in zip(engine.requests, chat.segments, strict=True):
        start = max(s for s in chat.starts if s < segment.start)
        assert request.prompt_token_ids == tuple(chat.token_ids[start : segment.start])


def first_messages(family: Family) -> list[dict[str, str]]:
    system = [{"role": "system", "content": "Be brief."}] if family.system else []
    return [*system, {"role": "user", "content": "What is 3 + 4?"}]


@FAMILY
def test_two_turns_are_the_templates_text_and_the_sampled_tokens(family: Family) -> None:
    tokenizer = family.tokenizer()
    sampled = [encode(tokenizer, text + family.end) for text in ("It is 7.", "Yes, twelve.")]
    engine = engine_of(*sampled)
    chat = talk(make_chat(tokenizer, engine), first_messages(family), "And 5 + 7?")
    check(chat, engine, sampled)
    assert chat.messages[-1] == {"role": "assistant", "content": "Yes, twelve."}
    whole = tokenizer.apply_chat_template(chat.messages[:-1], tokenize=False, add_generation_prompt=True)
    expected = whole + "Yes, twelve." + family.end
    assert tokenizer.decode(chat.token_ids).replace("]It", "] It") == expected
    if not family.gap:  # this text is nowhere ambiguous, so the ids are those of the whole text too
        assert chat.token_ids == encode(tokenizer, expected)


@FAMILY
def test_the_end_token_is_trained_and_what_the_template_puts_behind_it_is_not(family: Family) -> None:
    tokenizer = family.tokenizer()
    end = tokenizer.convert_tokens_to_ids(family.end)
    sampled = [[*encode(tokenizer, "one"), end], [*encode(tokenizer, "two"), end]]
    chat = talk(make_chat(tokenizer, engine_of(*sampled)), first_messages(family), "More?")
    at = chat.segments[0].end
    assert (chat.token_ids[at - 1], chat.loss_mask[at - 1]) == (end, 1)
    assert not any(chat.loss_mask[at : chat.segments[1].start])
    assert end not in chat.token_ids[at : at + 1], "the template's own end token is not added to the model's"
    behind = {"gemma": "\n", "llama3": "<|start_header_id|>", "mistral": "[INST]"}.get(family.name, "\n")
    assert tokenizer.decode(chat.token_ids[at:]).startswith(behind)


@FAMILY
def test_a_turn_that_was_cut_off_is_closed_untrained(family: Family) -> None:
    tokenizer = family.tokenizer()
    sampled = [encode(tokenizer, "It is the answer"), encode(tokenizer, "two" + family.end)]
    engine = engine_of(*sampled)
    chat = talk(make_chat(tokenizer, engine, max_tokens=3), first_messages(family), "More?")
    sampled = [sampled[0][:3], sampled[1][:3]]
    check(chat, engine, sampled)
    at = chat.segments[0].end
    assert chat.token_ids[at] == tokenizer.convert_tokens_to_ids(family.end)
    assert chat.loss_mask[at] == 0


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.other_ends], ids=lambda f: f.name)
def test_every_end_token_is_trained_as_sampled(family: Family) -> None:
    """CASES 26: the engine's finish reason decides, whichever of several end tokens it was."""
    for end in family.other_ends:
        tokenizer = family.tokenizer()
        sampled = [encode(tokenizer, "one" + end), encode(tokenizer, "two" + family.end)]
        engine = engine_of(*sampled)
        chat = talk(make_chat(tokenizer, engine), first_messages(family), "More?")
        assert chat.messages[-3]["content"] == "one"
        check(chat, engine, sampled)
        at = chat.segments[0].end
        assert chat.token_ids[at] == tokenizer.convert_tokens_to_ids(family.end), "the template closes the turn its way"


@FAMILY
def test_an_empty_turn(family: Family) -> None:
    tokenizer = family.tokenizer()
    sampled = [encode(tokenizer, family.end), encode(tokenizer, "two" + family.end)]
    engine = engine_of(*sampled)
    check(talk(make_chat(tokenizer, engine), first_messages(family), "More?"), engine, sampled)


@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.tool_role], ids=lambda f: f.name)
def test_tool_results_and_system_messages_in_between(family: Family) -> None:
    tokenizer = family.tokenizer()
    sampled = [encode(tokenizer, "one" + family.end), encode(tokenizer, "two" + family.end)]
    engine = engine_of(*sampled)
    between = [{"role": "tool", "content": "12"}, {"role": "tool", "content": "13"}]
    chat = talk(make_chat(tokenizer, engine), first_messages(family), between)
    check(chat, engine, sampled)
    whole = tokenizer.apply_chat_template(chat.messages[:-1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(chat.token_ids) == whole + "two" + family.end
    assert chat.token_ids == encode(tokenizer, whole + "two" + family.end)


@settings(max_examples=40)
@given(
    name=st.sampled_from(["chatml", "qwen2.5", "qwen3", "llama3", "gemma", "mistral"]),
    turns=st.lists(
        st.tuples(
            st.lists(st.integers(0, 599), max_size=8), st.sampled_from(["end", "other end", "cut"]), st.text(max_size=5)
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_whatever_ids_come_back_are_kept(name: str, turns: list[tuple[list[int], str, str]]) -> None:
    """CASES 27: no id is ever decoded and encoded again, and nothing but sampled ids is trained."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    sampled, asked = [], []
    for ids, how, user in turns:
        ids = [i % len(tokenizer) for i in ids if tokenizer.decode([i % len(tokenizer)]).isascii()]
        ids = [i for i in ids if i not in tokenizer.all_special_ids and "<" not in tokenizer.decode([i])]
        end = {"end": family.end, "other end": (family.other_ends or (family.end,))[0], "cut": None}[how]
        sampled.append([*ids, tokenizer.convert_tokens_to_ids(end)] if end else [*ids, *encode(tokenizer, "cut")][:8])
        asked.append(f"user {len(asked)} {user}")
    engine = engine_of(*sampled)
    chat = talk(make_chat(tokenizer, engine), *asked)
    check(chat, engine, sampled)
    assert chat.starts == [0]


def thinking(tokenizer: Any) -> list[list[int]]:
    return [
        encode(tokenizer, text + "<|im_end|>")
        for text in (
            "<think>\nthe tool\n</think>\n\n7",
            "<think>\nat all\n</think>\n\n12",
            "<think>\nno\n</think>\n\n13",
        )
    ]


def test_thinking_is_kept_as_long_as_the_template_keeps_it() -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    sampled = thinking(tokenizer)[:2]
    engine = engine_of(*sampled)
    chat = talk(make_chat(tokenizer, engine), "3 + 4?", [{"role": "tool", "content": "7"}])
    check(chat, engine, sampled)
    assert chat.starts == [0]
    assert "the tool" in tokenizer.decode(chat.token_ids)


def test_thinking_in_other_white_space_than_the_templates_is_no_rewrite() -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    sampled = [encode(tokenizer, "<think>hm</think>7<|im_end|>"), encode(tokenizer, "8<|im_end|>")]
    engine = engine_of(*sampled)
    check(talk(make_chat(tokenizer, engine), "3 + 4?", [{"role": "tool", "content": "7"}]), engine, sampled)


def test_a_template_that_drops_thinking_is_refused_by_name_with_the_fix() -> None:
    """CASES 28."""
    tokenizer = FAMILIES["qwen3"].tokenizer()
    engine = engine_of(*thinking(tokenizer))
    chat = make_chat(tokenizer, engine)
    with pytest.raises(TemplateRewriteError) as caught:
        talk(chat, "3 + 4?", [{"role": "tool", "content": "7"}], "And 6 + 6?")
    text = str(caught.value)
    assert "'qwen3-test' rewrites turns" in text
    assert "<think>\\nthe tool" in text, "what the conversation has"
    assert "renders '7<|im_end|>" in text, "what the template makes of it"
    assert "rollout.template_rewrite=split" in text
    assert caught.value.reason == "template"
    assert len(engine.requests) == 2
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"], "nothing was appended"


def test_split_goes_on_in_the_context_the_template_makes() -> None:
    """CASES 28: each generated token is trained once, in the context it was sampled in."""
    tokenizer = FAMILIES["qwen3"].tokenizer()
    sampled = thinking(tokenizer)
    engine = engine_of(*sampled)
    chat = make_chat(tokenizer, engine, template_rewrite="split")
    talk(chat, "3 + 4?", [{"role": "tool", "content": "7"}], "And 6 + 6?")
    check(chat, engine, sampled)
    first, second = chat.token_ids[: chat.starts[1]], chat.token_ids[chat.starts[1] :]
    assert tokenizer.decode(first).count("<think>") == 2
    assert tokenizer.decode(second) == (
        "<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n12<|im_end|>\n<|im_start|>user\nAnd 6 + 6?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nno\n</think>\n\n13<|im_end|>"
    )
    assert chat.segments[-1] == Segment(0, len(chat.token_ids) - len(sampled[2]), len(chat.token_ids))
    assert chat.prompt_length == chat.segments[0].start


def test_a_generation_prompt_that_is_not_in_the_conversation_is_a_rewrite() -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    tokenizer.chat_template = "{% set enable_thinking = false %}" + QWEN3
    sampled = [encode(tokenizer, "7<|im_end|>"), encode(tokenizer, "12<|im_end|>")]
    with pytest.raises(TemplateRewriteError, match="<think>"):
        talk(make_chat(tokenizer, engine_of(*sampled)), "3 + 4?", "6 + 6?")
    engine = engine_of(*sampled)
    chat = talk(make_chat(tokenizer, engine, template_rewrite="split"), "3 + 4?", "6 + 6?")
    check(chat, engine, sampled)
    assert len(chat.starts) == 2


def test_the_context_limit_is_that_of_one_context() -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    sampled = thinking(tokenizer)
    alone = make_chat(tokenizer, engine_of(*sampled), template_rewrite="split")
    talk(alone, "3 + 4?", "And 6 + 6?")
    longest = max(alone.starts[1], len(alone.token_ids) - alone.starts[1])
    chat = make_chat(
        tokenizer, engine_of(*sampled), template_rewrite="split", limits=BudgetLimits(max_context=longest + 1)
    )
    talk(chat, "3 + 4?", "And 6 + 6?")
    assert chat.token_ids == alone.token_ids
    assert chat.budget.context == longest + 1 - (len(alone.token_ids) - alone.starts[1])
    with pytest.raises(ContextFullError):
        talk(chat, "word " * longest)
    assert chat.token_ids == alone.token_ids, "nothing was appended"


def test_a_template_that_fails_is_an_error_under_split_too() -> None:
    tokenizer = FAMILIES["gemma"].tokenizer()
    engine = engine_of(encode(tokenizer, "7<end_of_turn>"))
    chat = make_chat(tokenizer, engine, template_rewrite="split")
    with pytest.raises(TemplateError, match=r"gemma-test.*must alternate"):
        talk(chat, "3 + 4?", [{"role": "user", "content": "a"}, {"role": "user", "content": json.dumps([1])}])
