"""Calculator: problems with exact answers, a tool that evaluates nothing, and demonstrations that get the reward."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest

from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments import Calculator, Environment, Task, ToolCall, make_rollout
from async_rl.environments.demonstrations import Trace, demonstrate
from async_rl.environments.tool import CallOutcome, Tool
from async_rl.types import Prompt, RolloutTask, Trajectory


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


def rollout(tokenizer: Any, environment: Environment, *turns: str) -> Trajectory:
    """One attempt at the first training prompt in which the model says ``turns``."""
    said = iter(turns)
    engine = ScriptedEngine(lambda prompt, seed: [*tokenizer.encode(next(said)), tokenizer.eos_token_id])
    prompt = Prompt("calculator/0/0", "calculator", environment.prompts("train")[0])
    sampling = SamplingParams(max_tokens=200)

    async def run() -> Trajectory:
        await engine.load_weights(0, None)  # type: ignore[arg-type]
        run_one = make_rollout({"calculator": environment}, tokenizer, sampling)
        return await run_one(RolloutTask(0, prompt, 0, 0, seed=1), engine)

    return asyncio.run(run())


def call(expression: str) -> str:
    return f'<tool_call>{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def test_the_same_seed_gives_the_same_problems_and_no_problem_is_in_both_splits() -> None:
    env = Calculator(train_size=300, eval_size=50, seed=1)
    train, held_out = env.prompts("train"), env.prompts("eval")
    assert (len(train), len(held_out)) == (300, 50)
    questions = [row["question"] for row in [*train, *held_out]]
    assert len(set(questions)) == 350
    assert Calculator(train_size=300, eval_size=50, seed=1).prompts("train") == train
    assert Calculator(train_size=300, eval_size=50, seed=2).prompts("train") != train
    for row in train:
        assert row["answer"] == str(eval(row["expression"]))  # ours, not a model's
        assert int(row["answer"]) >= 0


def test_a_call_and_an_answer_are_two_turns_and_the_reward_is_for_the_last_number(tokenizer: Any) -> None:
    env = Calculator()
    row = env.prompts("train")[0]
    trajectory = rollout(tokenizer, env, call(row["expression"]), f"It is {row['answer']}.")
    assert (trajectory.turns, trajectory.reward) == (2, 1.0)
    assert trajectory.reward_parts == {"tool_calls": 1, "tool_errors": 0, "tool_timeouts": 0}
    assert rollout(tokenizer, env, call(row["expression"]), "It is 3.").reward == 0.0
    assert rollout(tokenizer, env, row["answer"]).reward == 1.0  # in its head is as good
    trajectory = rollout(tokenizer, env, call("__import__('os')"), call("9**9**9"), row["answer"])
    assert (trajectory.turns, trajectory.reward, trajectory.reward_parts["tool_errors"]) == (3, 1.0, 2)


def test_the_tool_calculates_and_refuses_everything_else(caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool(Calculator().calculate)

    def said(expression: str) -> str:
        return asyncio.run(tool.call({"expression": expression}, 5.0)).text

    assert said("12*(3+4)") == "84"
    assert said("open('x','w')").startswith("Error: cannot read")
    assert said("1/0") == "Error: division by zero"
    assert said("9**9**9") == "Error: the exponent must be a whole number and the result have at most 77 digits"
    assert not caplog.records  # the model's mistakes are no news


def test_the_tool_may_take_its_time_with_a_heavy_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    tool = Tool(Calculator(tool_latency_s=2.0).calculate)
    for _ in range(2000):
        assert asyncio.run(tool.call({"expression": "1+1"}, 5.0)).outcome is CallOutcome.OK
    assert statistics.mean(waits) == pytest.approx(2.0, rel=0.15)
    assert max(waits) > 10.0


@pytest.mark.parametrize(
    "wrong", [{"train_size": 0}, {"eval_size": 0}, {"tool_latency_s": -1}, {"tool_latency_s": float("nan")}]
)
def test_a_number_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"environment.{next(iter(wrong))}="):
        Calculator(**wrong)


# demonstrations


def learned(tokenizer: Any, trace: Trace) -> str:
    return str(tokenizer.decode([t for t, mask in zip(trace.token_ids, trace.loss_mask, strict=True) if mask]))


def test_a_trace_is_what_a_perfect_rollout_would_be(tokenizer: Any) -> None:
    env = Calculator(train_size=20, eval_size=1)
    traces = demonstrate({"calculator": env}, tokenizer, 3, seed=4)
    assert len({tuple(t.token_ids) for t in traces}) == 3
    assert demonstrate({"calculator": env}, tokenizer, 3, seed=4) == traces
    assert demonstrate({"calculator": env}, tokenizer, 3, seed=5) != traces
    row = env.prompts("train")[0]
    by_question = {tokenizer.decode(t.token_ids): t for t in demonstrate({"c": env}, tokenizer, 20)}
    trace = next(t for text, t in by_question.items() if row["question"] in text)
    assert learned(tokenizer, trace) == f"{call(row['expression'])}<|im_end|>{row['answer']}<|im_end|>"
    trajectory = rollout(tokenizer, env, call(row["expression"]), row["answer"])
    assert (trace.token_ids, trace.loss_mask) == (trajectory.token_ids, trajectory.loss_mask)


def test_environments_that_demonstrate_take_turns_and_the_others_are_left_out(tokenizer: Any) -> None:
    plain = Task([{"prompt": "?"}], lambda p, c: 1.0)
    traces = demonstrate({"a": Calculator(), "none": plain, "b": Calculator(seed=3)}, tokenizer, 4)
    assert len(traces) == 4
    with pytest.raises(ValueError, match=r"none of the environments task has a method demonstrate"):
        demonstrate({"task": plain}, tokenizer, 1)


def test_a_demonstration_without_reward_is_refused(tokenizer: Any) -> None:
    class Wrong(Calculator):
        def demonstrate(self, prompt: Any, messages: Any) -> str:
            return "no idea"

    with pytest.raises(ValueError, match=r"Wrong\.demonstrate gets a reward of 0, .*no idea"):
        demonstrate({"wrong": Wrong()}, tokenizer, 1)
    with pytest.raises(ValueError, match=r"a demonstrated turn has \d+ tokens, the longest may have 4"):
        demonstrate({"c": Calculator()}, tokenizer, 1, max_tokens=4)


def test_a_demonstrated_call_that_fails_is_pointed_out(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Clumsy(Calculator):
        def demonstrate(self, prompt: Any, messages: Any) -> str | ToolCall:
            return ToolCall("calculator", {}) if len(messages) == 1 else str(prompt["answer"])

    demonstrate({"clumsy": Clumsy()}, tokenizer, 1)
    assert "a demonstration has 1 tool_errors, which the model will learn from" in caplog.text
    caplog.clear()
    demonstrate({"calculator": Calculator()}, tokenizer, 1)
    assert not caplog.text
