"""ToolEnvironment and its tools: calls, errors as text, deadlines, budgets, metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
from template_families import FAMILIES

from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments import (
    BudgetError,
    BudgetLimits,
    Chat,
    Reward,
    RewardTimeoutError,
    ToolEnvironment,
    make_rollout,
)
from async_rl.environments.tool import CallOutcome, Tool
from async_rl.environments.tool_calls import MalformedCall, ToolCall
from async_rl.environments.toolbox import Toolbox
from async_rl.types import Prompt, RolloutTask, Trajectory


def multiply(a: int, b: int = 2) -> int:
    """Multiplies two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return a * b


class Products(ToolEnvironment):
    """Asks for a product; the tools, the score and the deadline are the test's."""

    def __init__(
        self,
        *tools: Callable[..., Any],
        score: Callable[..., Any] = lambda prompt, completion, chat: float("42" in completion),
        tool_timeout_s: float = 5.0,
    ) -> None:
        self._tools = tools or (multiply,)
        self._score = score
        self.tool_timeout_s = tool_timeout_s

    def prompts(self, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"a": 6, "b": 7}]

    def messages(self, prompt: Mapping[str, Any]) -> str:
        return f"What is {prompt['a']} * {prompt['b']}?"

    def tools(self, prompt: Mapping[str, Any]) -> Sequence[Callable[..., Any]]:
        return self._tools

    def reward(self, prompt: Mapping[str, Any], completion: str, chat: Chat) -> Any:
        return self._score(prompt, completion, chat)


def call(name: str = "multiply", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Model:
    """A scripted engine that says one text after another, and what it was shown."""

    def __init__(self, *turns: str, family: str = "qwen2.5", **engine: Any) -> None:
        self.tokenizer = FAMILIES[family].tokenizer()
        end = FAMILIES[family].end
        replies = iter([self.tokenizer.encode(t + end, add_special_tokens=False) for t in turns])
        self.engine = ScriptedEngine(lambda prompt, seed: next(replies), **engine)
        asyncio.run(self.engine.load_weights(0, None))  # type: ignore[arg-type]

    def run(self, environment: ToolEnvironment, **kwargs: Any) -> Trajectory:
        async def go() -> Trajectory:
            rollout = make_rollout({"e": environment}, self.tokenizer, SamplingParams(max_tokens=100), **kwargs)
            return await rollout(RolloutTask(0, Prompt("e/0/0", "e", {"a": 6, "b": 7}), 0, 0, 1), self.engine)

        return asyncio.run(go())

    def shown(self, turn: int) -> str:
        """What the model saw before one of its turns."""
        text: str = self.tokenizer.decode(self.engine.requests[turn].prompt_token_ids)
        return text


def results_of(text: str) -> list[str]:
    return [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]


def counts(trajectory: Trajectory) -> tuple[float, ...]:
    return tuple(trajectory.reward_parts[f"tool_{name}"] for name in ("calls", "errors", "timeouts"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_every_family_calls_a_tool_and_answers(family: str) -> None:
    made = '{"name": "multiply", "parameters": {"a": 6, "b": 7}}' if family == "llama3" else call(a=6, b=7)
    model = Model(made, "It is 42.", family=family)
    trajectory = model.run(Products())
    assert (trajectory.reward, trajectory.turns, trajectory.completion) == (1.0, 2, "It is 42.")
    assert counts(trajectory) == (1, 0, 0)
    assert "42" in model.shown(1)[len(model.shown(0)) :]
    trained = [t for t, m in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if m]
    end = FAMILIES[family].end
    assert model.tokenizer.decode(trained) == f"{made}{end}It is 42.{end}", (
        "the result and the template are not trained"
    )


def test_no_call_is_an_answer_and_the_counts_are_there() -> None:
    trajectory = Model("42").run(Products())
    assert (trajectory.reward, trajectory.turns, counts(trajectory)) == (1.0, 1, (0, 0, 0))


def test_several_calls_of_a_turn_run_at_the_same_time_with_results_in_order() -> None:
    began, done = threading.Barrier(3, timeout=60), [threading.Event() for _ in range(4)]
    done[3].set()

    def slow(i: int) -> str:
        """Begins with the others and ends after the next one.

        Args:
            i: Which.
        """
        began.wait()
        assert done[i + 1].wait(60)
        done[i].set()
        return f"done {i}"

    model = Model("".join(call("slow", i=i) for i in range(3)), "42")
    assert counts(model.run(Products(slow))) == (3, 0, 0)
    assert results_of(model.shown(1)) == ["done 0", "done 1", "done 2"]


def failing(x: int) -> str:
    """Fails.

    Args:
        x: How.
    """
    raise [ValueError("no such x"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration()][x]


async def failing_async(x: int) -> str:
    """Fails.

    Args:
        x: How.
    """
    return failing(x)


def unprintable() -> object:
    """Gives what can't be shown."""

    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    return Bad()


@pytest.mark.parametrize("tool", [failing, failing_async])
@pytest.mark.parametrize(
    ("x", "text"), list(enumerate(["no such x", "SystemExit", "Interrupt", "Cancelled", "StopIteration"]))
)
def test_whatever_a_tool_raises_is_told_to_the_model(tool: Any, x: int, text: str) -> None:
    model = Model(call(tool.__name__, x=x), "42")
    trajectory = model.run(Products(tool))
    assert (trajectory.reward, counts(trajectory)) == (1.0, (1, 1, 0))
    (told,) = results_of(model.shown(1))
    assert told.startswith("Error: ")
    assert text in told


def test_the_first_exception_of_a_tool_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def broken_once() -> None:
        """Fails."""
        raise ValueError("a bug of the user")

    with caplog.at_level(logging.WARNING, "async_rl"):
        for _ in range(2):
            Model(call("broken_once"), "42").run(Products(broken_once))
    assert [r.getMessage().split(" raised")[0] for r in caplog.records] == ["tool broken_once"]
    assert "a bug of the user" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ("<tool_call>\n{oops\n</tool_call>", "Error: the tool call is not valid JSON"),
        (call("divide", a=1), "Error: no tool 'divide'; tools: multiply"),
        (call(b=3), "Error: multiply needs the argument 'a'"),
        (call(a=3, c=3), "Error: multiply has no argument 'c'; its arguments are a, b"),
        (call(a="six"), "Error: multiply: the argument 'a' must be integer, got \"six\""),
        (call(a=True), "Error: multiply: the argument 'a' must be integer, got true"),
        (call("unprintable"), "Error: RuntimeError: no text"),
    ],
)
def test_a_bad_call_is_told_to_the_model(turn: str, told: str) -> None:
    model = Model(turn, "42")
    tools = (unprintable,) if "unprintable" in turn else (multiply,)
    trajectory = model.run(Products(*tools))
    assert counts(trajectory) == (1, 1, 0)
    assert results_of(model.shown(1))[0].startswith(told)


async def sleepy_async() -> str:
    """Sleeps."""
    await asyncio.sleep(600)
    return "late"


def sleepy() -> str:
    """Sleeps."""
    time.sleep(600)
    return "late"


def impatient() -> str:
    """Has a time-out of its own."""
    raise TimeoutError("the server did not answer")


@pytest.mark.parametrize("tool", [sleepy, sleepy_async])
def test_a_tool_over_its_deadline_is_told_to_the_model(tool: Any) -> None:
    model = Model(call(tool.__name__), "42")
    trajectory = model.run(Products(tool, tool_timeout_s=0.05))
    assert counts(trajectory) == (1, 0, 1)
    assert results_of(model.shown(1)) == [f"Error: {tool.__name__} took more than 0.05 s"]


def test_a_tools_own_time_out_is_an_error() -> None:
    assert counts(Model(call("impatient"), "42").run(Products(impatient))) == (1, 1, 0)


def test_a_blocking_tool_leaves_other_rollouts_their_pace() -> None:
    """CASES 5."""
    model = Model(call("blocks"), "42")
    began, go_on = threading.Event(), threading.Event()

    def blocks() -> str:
        """Blocks."""
        began.set()
        return "went on" if go_on.wait(60) else "held up the loop that would have let it go on"

    async def go() -> None:
        rollout = make_rollout({"e": Products(blocks, tool_timeout_s=120)}, model.tokenizer, SamplingParams())
        task = asyncio.ensure_future(
            rollout(RolloutTask(0, Prompt("e/0/0", "e", {"a": 6, "b": 7}), 0, 0, 1), model.engine)
        )
        while not began.is_set():
            await asyncio.sleep(0.001)
        go_on.set()
        await task

    asyncio.run(go())
    assert results_of(model.shown(1)) == ["went on"]


def test_the_deadline_of_the_attempt_ends_a_hanging_tool() -> None:
    """CASES 1: the attempt is cancelled from outside, and the model is not told."""
    model = Model(call("sleepy_async"), "42")

    async def go() -> None:
        rollout = make_rollout({"e": Products(sleepy_async, tool_timeout_s=100)}, model.tokenizer, SamplingParams())
        async with asyncio.timeout(0.1):
            await rollout(RolloutTask(0, Prompt("e/0/0", "e", {"a": 6, "b": 7}), 0, 0, 1), model.engine)

    with pytest.raises(TimeoutError):
        asyncio.run(go())
    assert len(model.engine.requests) == 1


def test_the_last_turn_of_the_budget_is_the_answer() -> None:
    called: list[int] = []

    def note(i: int) -> str:
        """Notes.

        Args:
            i: What.
        """
        called.append(i)
        return "noted"

    model = Model(*(call("note", i=i) for i in range(5)))
    trajectory = model.run(Products(note), limits=BudgetLimits(max_turns=3))
    assert called == [0, 1], "what no turn can read is not called"
    assert (trajectory.turns, trajectory.reward, counts(trajectory)) == (3, 0.0, (2, 0, 0))
    assert trajectory.completion == call("note", i=2)


def test_results_that_do_not_fit_end_the_attempt_with_what_there_is() -> None:
    def long() -> str:
        """Talks."""
        return "word " * 5000

    model = Model(call("long"), "42")
    trajectory = model.run(Products(long), limits=BudgetLimits(max_context=2000))
    assert (trajectory.turns, counts(trajectory)) == (1, (1, 0, 0))
    assert len(trajectory.token_ids) < 2000
    assert trajectory.token_ids[-1] == model.tokenizer.eos_token_id


def test_a_conversation_that_outgrows_the_engine_is_scored_for_what_there_is() -> None:
    def long() -> str:
        """Talks."""
        return "word " * 5000

    model = Model(call("long"), "42", max_context=2000)
    trajectory = model.run(Products(long))
    assert (trajectory.turns, counts(trajectory)) == (1, (1, 0, 0))


def test_no_budget_for_the_first_turn_fails_the_attempt() -> None:
    with pytest.raises(BudgetError, match="max_context is 20"):
        Model("42").run(Products(), limits=BudgetLimits(max_context=20))


def test_the_reward_may_be_of_any_kind_and_sees_the_conversation() -> None:
    seen: list[Any] = []

    async def score(prompt: Any, completion: str, chat: Chat) -> Reward:
        seen.append(([m["role"] for m in chat.messages], chat.turns, prompt))
        return Reward(0.5, {"style": 1.0, "tool_errors": 9.0})

    trajectory = Model(call(a=6, b=7), "42").run(Products(score=score))
    assert seen == [(["user", "assistant", "tool", "assistant"], 2, {"a": 6, "b": 7})]
    assert trajectory.reward == 0.5
    assert trajectory.reward_parts == {"style": 1.0, "tool_calls": 1, "tool_errors": 9.0, "tool_timeouts": 0}


def test_a_reward_that_hangs_is_a_failed_sample() -> None:
    released = threading.Event()
    with pytest.raises(RewardTimeoutError, match=r"Products\.reward took more than 0\.05 s"):
        Model("42").run(Products(score=lambda *_: float(released.wait(600))), reward_timeout_s=0.05)
    released.set()


def test_tools_of_an_attempt_share_state_of_their_own() -> None:
    class Counting(Products):
        def tools(self, prompt: Mapping[str, Any]) -> Sequence[Callable[..., Any]]:
            calls: list[int] = []

            def count() -> int:
                """Counts."""
                calls.append(1)
                return len(calls)

            return [count]

    for _ in range(2):
        model = Model(call("count"), call("count"), "42")
        model.run(Counting())
        assert results_of(model.shown(2)) == ["1", "2"]


# tools by themselves


def choose(
    kind: Literal["red", "green"],
    many: list[float],
    pair: tuple[int, str] | None = None,
    table: dict[str, int] | None = None,
    either: int | str = 0,
    nested: list[int] | str = "",
) -> str:
    """Chooses.

    Args:
        kind: A colour.
        many: Numbers.
        pair: Two.
        table: By name.
        either: One or the other.
        nested: Several or none.
    """
    return "ok"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, ""),
        ({"many": [1, 2.5]}, ""),
        ({"pair": [1, "x"], "table": {"a": 1}, "either": "x", "nested": [1]}, ""),
        ({"pair": None, "table": None, "nested": ""}, ""),
        ({"kind": "blue"}, "'kind' must be one of"),
        ({"kind": None}, "'kind' must be one of"),
        ({"many": 1}, "'many' must be array"),
        ({"many": [1, "2"]}, "'many' must be an array whose items are number"),
        ({"many": [True]}, "'many' must be an array whose items are number"),
        ({"pair": [1]}, "'pair' must be an array of 2 items"),
        ({"pair": ["x", 1]}, "'pair' must be an array whose items are integer"),
        ({"table": {"a": "b"}}, "'table' must be an object whose values are integer"),
        ({"table": []}, "'table' must be object"),
        ({"either": 1.5}, "'either' must be integer or string"),
        ({"either": None}, "'either' must be integer or string"),
        ({"nested": ["x"]}, "'nested' must be an array whose items are integer or string"),
    ],
)
def test_arguments_are_checked_against_the_schema(arguments: dict[str, Any], fault: str) -> None:
    got = Tool(choose).fault_of({"kind": "red", "many": [], **arguments})
    assert fault in got
    assert bool(got) == bool(fault)


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> int:  # type: ignore[no-untyped-def]
    """Has none.

    Args:
        a: A number.
    """
    return 0


def no_description(a: int) -> int:
    """Has none."""
    return a


def any_number(*a: int) -> int:
    """Sums.

    Args:
        a: Numbers.
    """
    return sum(a)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (no_docstring, "no docstring"),
        (no_hint, "missing a type hint"),
        (no_description, "no description for the argument 'a'"),
        (any_number, "by name"),
        ("multiply", "cannot be called"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_by_name(function: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=f"tool .*{getattr(function, '__name__', function)}.*{problem}"):
        Tool(function)


def test_the_schema_says_what_the_model_needs_and_no_more() -> None:
    assert Tool(multiply).schema == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiplies two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "One number."},
                    "b": {"type": "integer", "description": "The other."},
                },
                "required": ["a"],
            },
        },
    }


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools are called 'multiply'"):
        Toolbox([multiply, multiply], 1.0)


class Store:
    """Methods, async functions and callable objects are tools too."""

    def get(self, key: str) -> dict[str, int]:
        """Gets.

        Args:
            key: Which.
        """
        return {key: 1}

    async def get_async(self, key: str) -> list[str]:
        """Gets.

        Args:
            key: Which.
        """
        return [key, "ä"]


def test_methods_and_results_that_are_no_text() -> None:
    store = Store()
    box = Toolbox([store.get, store.get_async], 1.0)
    calls = [ToolCall("get", {"key": "x"}), ToolCall("get_async", {"key": "y"}), MalformedCall("oops")]
    results = asyncio.run(box.run(calls))
    assert [r.text for r in results] == ['{"x": 1}', '["y", "ä"]', "Error: oops"]
    assert [r.outcome for r in results] == [CallOutcome.OK, CallOutcome.OK, CallOutcome.ERROR]
    assert results[0].message == {"role": "tool", "name": "get", "content": '{"x": 1}'}


def test_too_many_calls_of_one_turn_are_not_carried_out() -> None:
    results = asyncio.run(Toolbox([multiply], 1.0, max_calls=2).run([ToolCall("multiply", {"a": i}) for i in range(4)]))
    assert [r.text for r in results] == ["0", "2", *["Error: not called, more than 2 calls in one turn"] * 2]
