"""Chat: token-in token-out conversations on the tiny ChatML tokenizer."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from async_rl.engines.base import EngineError, Generation, GenerationRequest, SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments import (
    PLAIN_TEMPLATE,
    BlockingChat,
    BudgetError,
    BudgetLimits,
    Chat,
    ChatTemplate,
    ContextFullError,
    TemplateError,
)
from async_rl.environments.blocking_chat import RolloutCancelled
from async_rl.environments.chat import turn_seed
from async_rl.types import Segment, head_version, tail_version


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def engine_saying(tokenizer: Any, *turns: str, **kwargs: Any) -> ScriptedEngine:
    """An engine whose n-th request gets the n-th text, encoded with its special tokens."""
    replies = iter([tokenizer.encode(t, add_special_tokens=False) for t in turns])
    engine = ScriptedEngine(lambda prompt, seed: next(replies), logprob=-0.5, **kwargs)
    asyncio.run(engine.load_weights(0, None))  # type: ignore[arg-type]
    return engine


def make_chat(engine: Any, tokenizer: Any, **kwargs: Any) -> Chat:
    sampling = kwargs.pop("sampling", SamplingParams(max_tokens=64))
    return Chat(engine, ChatTemplate(tokenizer), sampling, seed=kwargs.pop("seed", 1), **kwargs)


def sampled_text(chat: Chat, tokenizer: Any) -> str:
    return tokenizer.decode([t for t, m in zip(chat.token_ids, chat.loss_mask, strict=True) if m])


def test_one_turn_is_the_template_then_the_engines_tokens(tokenizer: Any) -> None:
    engine = engine_saying(tokenizer, "7<|im_end|>")
    chat = make_chat(engine, tokenizer)
    text = asyncio.run(chat.generate([{"role": "user", "content": "3+4?"}]))
    assert text == chat.completion == "7"
    assert tokenizer.decode(chat.token_ids) == "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n7<|im_end|>"
    assert engine.requests[0].prompt_token_ids == tuple(chat.token_ids[: chat.prompt_length])
    assert chat.loss_mask == [0] * chat.prompt_length + [1, 1], "the end token the model sampled is trained"
    assert chat.logprobs == [0.0] * chat.prompt_length + [-0.5, -0.5]
    assert chat.segments == [Segment(0, chat.prompt_length, chat.prompt_length + 2)]
    assert chat.messages[-1] == {"role": "assistant", "content": "7"}


def test_later_turns_append_what_the_template_adds_and_nothing_else(tokenizer: Any) -> None:
    engine = engine_saying(tokenizer, "a<|im_end|>", "bc<|im_end|>")
    chat = make_chat(engine, tokenizer)

    async def talk() -> None:
        await chat.generate("one")
        chat.add({"role": "tool", "content": "result"})
        await chat.generate("two")

    asyncio.run(talk())
    assert tokenizer.decode(chat.token_ids) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        "<|im_start|>tool\nresult<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>"
    )
    assert sampled_text(chat, tokenizer) == "a<|im_end|>bc<|im_end|>", (
        "the newline after the end token is the template's"
    )
    assert chat.turns == 2
    assert [(s.end - s.start) for s in chat.segments] == [2, 3]
    for segment in chat.segments:
        assert all(chat.loss_mask[segment.start : segment.end])
    assert engine.requests[1].prompt_token_ids == tuple(chat.token_ids[: chat.segments[1].start])


def test_a_truncated_turn_is_closed_by_the_template_with_mask_zero(tokenizer: Any) -> None:
    chat = make_chat(
        engine_saying(tokenizer, "abcdef", "x<|im_end|>"), tokenizer, sampling=SamplingParams(max_tokens=3)
    )

    async def talk() -> None:
        assert await chat.generate("one") == "abc"
        assert chat.finish_reason == "length"
        await chat.generate("two")

    asyncio.run(talk())
    assert "assistant\nabc<|im_end|>\n<|im_start|>user\ntwo<|im_end|>" in tokenizer.decode(chat.token_ids)
    assert sampled_text(chat, tokenizer) == "abcx<|im_end|>"


def test_a_truncated_turn_may_end_with_any_special_token(tokenizer: Any) -> None:
    chat = make_chat(
        engine_saying(tokenizer, "a<|im_start|>b", "x<|im_end|>"), tokenizer, sampling=SamplingParams(max_tokens=2)
    )

    async def talk() -> None:
        await chat.generate("one")
        await chat.generate("two")

    asyncio.run(talk())
    assert "assistant\na<|im_start|><|im_end|>\n<|im_start|>user\ntwo" in tokenizer.decode(chat.token_ids)


def test_another_end_token_than_the_templates_is_kept_and_trained(tokenizer: Any) -> None:
    chat = make_chat(engine_saying(tokenizer, "a<|endoftext|>", "b<|im_end|>"), tokenizer)

    async def talk() -> None:
        assert await chat.generate("one") == "a"
        await chat.generate("two")

    asyncio.run(talk())
    assert "assistant\na<|endoftext|><|im_end|>\n<|im_start|>user\n" in tokenizer.decode(chat.token_ids)
    assert sampled_text(chat, tokenizer) == "a<|endoftext|>b<|im_end|>"


def test_a_stop_string_is_trained_but_left_out_of_the_text(tokenizer: Any) -> None:
    chat = make_chat(engine_saying(tokenizer, "12;", "x<|im_end|>"), tokenizer)

    async def talk() -> None:
        assert await chat.generate("one", stop=(";",)) == "12"
        await chat.generate("two")

    asyncio.run(talk())
    assert sampled_text(chat, tokenizer) == "12;x<|im_end|>"
    assert "assistant\n12;<|im_end|>\n<|im_start|>user\ntwo" in tokenizer.decode(chat.token_ids)


def test_ids_that_do_not_survive_decode_and_encode_are_trained_as_returned(tiny_model_dir: Path) -> None:
    """CASES 27: a merge the tokenizer would never make itself is kept."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.add_tokens(["ab"])
    a, b, end = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", "<|im_end|>"))
    assert tokenizer.encode("ab", add_special_tokens=False) != [a, b]
    engine = ScriptedEngine(lambda prompt, seed: [a, b, end])
    asyncio.run(engine.load_weights(0, None))  # type: ignore[arg-type]
    chat = make_chat(engine, tokenizer)

    async def talk() -> None:
        assert await chat.generate("one") == "ab"
        await chat.generate("two")

    asyncio.run(talk())
    for segment in chat.segments:
        assert chat.token_ids[segment.start : segment.end] == [a, b, end]


THINK_DROPPING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REORDERING = (
    "{% for m in messages | reverse %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIGNING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% if m['role'] == 'assistant' %} - me"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINK_ADDING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        (THINK_DROPPING, "<think>hm</think>7<|im_end|>"),
        (REORDERING, "7<|im_end|>"),
        (THINK_ADDING, "7<|im_end|>"),
        (THINK_ADDING, "<|im_end|>"),
        (SIGNING, "7<|im_end|>"),
    ],
)
def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: Any, template: str, turn: str) -> None:
    """CASES 28."""
    tokenizer.chat_template = template
    chat = make_chat(engine_saying(tokenizer, turn, "8<|im_end|>"), tokenizer)

    async def talk() -> None:
        await chat.generate("one")
        await chat.generate("two")

    with pytest.raises(TemplateError, match="rewrites turns"):
        asyncio.run(talk())


TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (  # in the manner of Llama 2 and Mistral: no generation prompt, spaces around the model's turn
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] | trim }} <|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TRIMMING, "assistant\n 7\n<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n8<|im_end|>"),
        (BRACKETS, "[INST] one [/INST] 7\n<|im_end|>[INST] two [/INST]8<|im_end|>"),
    ],
)
def test_a_template_that_only_differs_in_white_space_is_fine(tokenizer: Any, template: str, expected: str) -> None:
    tokenizer.chat_template = template
    chat = make_chat(engine_saying(tokenizer, " 7\n<|im_end|>", "8<|im_end|>"), tokenizer)

    async def talk() -> None:
        await chat.generate("one")
        await chat.generate("two")

    asyncio.run(talk())
    assert tokenizer.decode(chat.token_ids).endswith(expected)


def test_plain_template_joins_messages_and_no_template_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match=r"chat_template\.jinja"):
        ChatTemplate(tokenizer)
    tokenizer.chat_template = PLAIN_TEMPLATE
    chat = make_chat(engine_saying(tokenizer, "b.", "d<|endoftext|>"), tokenizer)

    async def talk() -> None:
        await chat.generate("a", stop=(".",))
        await chat.generate("c")

    asyncio.run(talk())
    # The stop string is part of what was sampled; the text of the conversation goes on after it.
    assert tokenizer.decode(chat.token_ids) == "<|im_start|>ab.cd<|endoftext|>"


def test_a_failing_template_names_the_conversation(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    chat = make_chat(engine_saying(tokenizer, "x"), tokenizer)
    with pytest.raises(TemplateError, match="roles must alternate"):
        asyncio.run(chat.generate("hello"))


def test_max_context_shortens_the_turn_then_refuses(tokenizer: Any) -> None:
    engine = engine_saying(tokenizer, "abcdefgh", "x")
    chat = make_chat(engine, tokenizer, limits=BudgetLimits(max_context=24))

    async def talk() -> None:
        await chat.generate("hi")
        assert chat.budget.context == 0
        assert chat.budget.exhausted
        with pytest.raises(ContextFullError, match="max_context is 24"):
            await chat.generate("more")

    asyncio.run(talk())
    assert len(engine.requests) == 1
    assert engine.requests[0].sampling.max_tokens == 24 - chat.prompt_length == 3
    assert chat.finish_reason == "length"


@pytest.mark.parametrize("limit", [None, 24, 1000])
def test_the_engines_context_ends_a_conversation_as_the_budget_does(tokenizer: Any, limit: int | None) -> None:
    engine = engine_saying(tokenizer, "abcdefgh", "x", max_context=24 if limit != 24 else 1000)
    chat = make_chat(engine, tokenizer, limits=BudgetLimits(max_context=limit))

    async def talk() -> None:
        await chat.generate("hi")
        assert (chat.budget.context, chat.budget.exhausted) == (0, True)
        message = (
            "max_context is 24.*rollout.max_context$" if limit == 24 else "scripted-0 holds 24 .*'s max_model_len$"
        )
        with pytest.raises(ContextFullError, match=message) as error:
            await chat.generate("more")
        assert error.value.reason == "context"

    asyncio.run(talk())
    assert [request.sampling.max_tokens for request in engine.requests] == [3]
    assert chat.finish_reason == "length"


def test_the_budget_counts_down_clips_and_ends(tokenizer: Any) -> None:
    engine = engine_saying(tokenizer, "abc<|im_end|>", "defgh", "x")
    limits = BudgetLimits(max_turns=3, max_generated_tokens=7, max_context=200)
    chat = make_chat(engine, tokenizer, limits=limits)

    async def talk() -> None:
        assert (chat.budget.turns, chat.budget.tokens, chat.budget.context) == (3, 7, 200)
        await chat.generate("hi")
        assert (chat.budget.turns, chat.budget.tokens, chat.budget.context) == (2, 3, 200 - len(chat.token_ids))
        await chat.generate("go on", max_tokens=5)
        assert engine.requests[1].sampling.max_tokens == 3
        assert chat.completion == "def"
        assert (chat.budget.tokens, chat.budget.exhausted) == (0, True)
        before = list(chat.token_ids), list(chat.messages)
        with pytest.raises(
            BudgetError, match=r"max_generated_tokens=7 .*after 2 turns.*rollout\.max_generated_tokens"
        ) as e:
            await chat.generate("and on")
        assert e.value.reason == "budget"
        assert (chat.token_ids, chat.messages) == before, "nothing was appended"

    asyncio.run(talk())
    assert len(engine.requests) == 2


def test_turns_run_out(tokenizer: Any) -> None:
    chat = make_chat(engine_saying(tokenizer, "a<|im_end|>"), tokenizer, limits=BudgetLimits(max_turns=1))
    assert not chat.budget.exhausted
    asyncio.run(chat.generate("hi"))
    assert chat.budget.exhausted
    with pytest.raises(BudgetError, match=r"max_turns=1 .*rollout\.max_turns"):
        asyncio.run(chat.generate("more"))


def test_no_limits_are_never_exhausted(tokenizer: Any) -> None:
    chat = make_chat(engine_saying(tokenizer, "a<|im_end|>"), tokenizer)
    assert (chat.budget.turns, chat.budget.tokens, chat.budget.context) == (None, None, None)
    assert not chat.budget.exhausted
    assert chat.budget.clip(5) == 5


def test_a_trajectory_spans_versions_between_and_within_turns(tokenizer: Any) -> None:
    """CASES 15: the engine is updated between turns and in the middle of one."""
    ticks: list[float] = []

    async def sleep(seconds: float) -> None:
        ticks.append(seconds)
        if len(ticks) == 5:  # two loads and two tokens came before
            await engine.load_weights(4, None)  # type: ignore[arg-type]

    engine = engine_saying(tokenizer, "abcd<|im_end|>", "ef<|im_end|>", "gh<|im_end|>", sleep=sleep)
    chat = make_chat(engine, tokenizer)

    async def talk() -> None:
        await engine.load_weights(3, None)  # type: ignore[arg-type]
        await chat.generate("one")
        await chat.generate("two")
        await engine.load_weights(5, None)  # type: ignore[arg-type]
        await chat.generate("three")

    asyncio.run(talk())
    assert (head_version(chat.segments), tail_version(chat.segments)) == (3, 5)
    assert [(s.version, s.end - s.start) for s in chat.segments] == [(3, 2), (4, 3), (4, 3), (5, 3)]
    stamped = [i for s in chat.segments for i in range(s.start, s.end)]
    assert stamped == [i for i, m in enumerate(chat.loss_mask) if m], "every trained token has one stamp"
    third = "".join(tokenizer.decode([chat.token_ids[i]]) for s in chat.segments[-1:] for i in range(s.start, s.end))
    assert third == "gh<|im_end|>"


def test_tools_are_offered_before_the_first_turn(tokenizer: Any) -> None:
    chat = make_chat(engine_saying(tokenizer, "a<|im_end|>"), tokenizer)
    asyncio.run(chat.generate("hi"))
    with pytest.raises(RuntimeError, match=r"before the first chat\.generate"):
        chat.offer([])


@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k", "min_p"])
def test_overrides_that_change_the_distribution_are_refused(tokenizer: Any, key: str) -> None:
    chat = make_chat(engine_saying(tokenizer, "x"), tokenizer)
    with pytest.raises(ValueError, match=key):
        asyncio.run(chat.generate("hi", **{key: 0.5}))
    with pytest.raises(ValueError, match="max_tokens=0"):
        asyncio.run(chat.generate("hi", max_tokens=0))
    with pytest.raises(ValueError, match="max_tokens and stop"):
        asyncio.run(chat.generate("hi", max_token=3))


def test_generate_without_anything_to_answer_is_refused(tokenizer: Any) -> None:
    chat = make_chat(engine_saying(tokenizer, "x<|im_end|>"), tokenizer)
    with pytest.raises(ValueError, match="nothing to answer"):
        asyncio.run(chat.generate())
    asyncio.run(chat.generate("hi"))
    with pytest.raises(ValueError, match="nothing to answer"):
        asyncio.run(chat.generate())
    with pytest.raises(ValueError, match="role"):
        chat.add({"content": "x"})


def test_seeds_differ_by_turn_and_repeat_by_attempt(tokenizer: Any) -> None:
    engines = [engine_saying(tokenizer, "a<|im_end|>", "b<|im_end|>") for _ in range(2)]
    for engine in engines:
        chat = make_chat(engine, tokenizer, seed=5)

        async def talk(chat: Chat = chat) -> None:
            await chat.generate("one")
            await chat.generate("two")

        asyncio.run(talk())
    first, second = ([r.seed for r in e.requests] for e in engines)
    assert first == second == [turn_seed(5, 0), turn_seed(5, 1)]
    assert len({*first, turn_seed(6, 0), turn_seed(6, 1)}) == 4
    ids = [r.request_id for e in engines for r in e.requests]
    assert len(set(ids)) == 4


class Broken:
    """An engine that stamps too few tokens, or gives NaN."""

    name = "broken"
    versions_alive = 1

    def __init__(self, make: Callable[[GenerationRequest], Generation]) -> None:
        self._make = make

    async def generate(self, request: GenerationRequest) -> Generation:
        return self._make(request)


@pytest.mark.parametrize(
    "segments", [(), (Segment(0, 0, 1),), (Segment(0, 0, 2), Segment(1, 1, 2)), (Segment(0, 1, 3),)]
)
def test_tokens_without_exactly_one_stamp_are_an_engine_error(tokenizer: Any, segments: Sequence[Segment]) -> None:
    chat = make_chat(Broken(lambda r: Generation([5, 6], [0.0, 0.0], tuple(segments), "stop")), tokenizer)
    with pytest.raises(EngineError, match="broken"):
        asyncio.run(chat.generate("hi"))


def test_unknown_logprobs_stay_nan_and_several_versions_are_kept(tokenizer: Any) -> None:
    made = Generation([5, 6, 7], [math.nan, -1.0, -2.0], (Segment(3, 0, 1), Segment(4, 1, 3)), "stop")
    chat = make_chat(Broken(lambda r: made), tokenizer)
    asyncio.run(chat.generate("hi"))
    start = chat.prompt_length
    assert math.isnan(chat.logprobs[start])
    assert chat.loss_mask[start] == 1
    assert chat.segments == [Segment(3, start, start + 1), Segment(4, start + 1, start + 3)]


def test_blocking_chat_from_a_thread(tokenizer: Any) -> None:
    engine = engine_saying(tokenizer, "a<|im_end|>", "b<|im_end|>")
    chat = make_chat(engine, tokenizer, limits=BudgetLimits(max_turns=2))

    async def run() -> list[str]:
        blocking = BlockingChat(chat, asyncio.get_running_loop())
        with pytest.raises(RuntimeError, match="async def"):
            blocking.generate("on the loop itself")

        def user() -> list[str]:
            blocking.offer([])
            first = blocking.generate("one")
            assert blocking.calls == ()
            assert blocking.budget.turns == 1
            blocking.add("two")
            second = blocking.generate()
            assert blocking.budget.exhausted
            with pytest.raises(BudgetError):
                blocking.generate("three")
            return [first, second]

        return await asyncio.to_thread(user)

    assert asyncio.run(run()) == ["a", "b"]
    assert chat.turns == 2


def test_cancelled_blocking_chat_aborts_the_request_and_ends_the_thread(tokenizer: Any) -> None:
    engine = engine_saying(tokenizer, "abc<|im_end|>", latency_s=60.0)
    chat = make_chat(engine, tokenizer)
    ended: list[type[BaseException]] = []

    async def run() -> threading.Thread:
        blocking = BlockingChat(chat, asyncio.get_running_loop())

        def user() -> None:
            while True:
                try:
                    blocking.generate("one")
                except Exception:
                    continue  # an environment that swallows every error must still end
                except BaseException as error:
                    ended.append(type(error))
                    return

        thread = threading.Thread(target=user, daemon=True)
        thread.start()
        while not engine.requests:
            await asyncio.sleep(0.001)
        blocking.cancel()
        while thread.is_alive():
            await asyncio.sleep(0.001)
        return thread

    asyncio.run(asyncio.wait_for(run(), 5))
    assert ended == [RolloutCancelled]
    assert engine.aborted == [engine.requests[0].request_id]
