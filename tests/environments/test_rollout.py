"""make_rollout: environments of every kind, rewards of every kind, cancellation."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments import (
    Environment,
    Reward,
    RewardError,
    RewardTimeoutError,
    RolloutError,
    SingleTurn,
    make_rollout,
)
from async_rl.environments.rollout import to_reward
from async_rl.types import Prompt, RolloutTask, Trajectory


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


class Question(SingleTurn):
    """Scores with whatever function it is given."""

    def __init__(self, reward: Any = lambda prompt, completion: 1.0) -> None:
        self._reward = reward

    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{"q": "hi"}]

    def messages(self, prompt: Mapping[str, Any]) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt["q"]}]

    def reward(self, prompt: Mapping[str, Any], completion: str) -> Any:
        return self._reward(prompt, completion)


def task(environment: str = "e", group_id: int = 0, sample_index: int = 0) -> RolloutTask:
    return RolloutTask(group_id, Prompt("e/0/0", environment, {"q": "hi"}), sample_index, 2, 7)


def answer_engine(tokenizer: Any, text: str = "42<|im_end|>", **kwargs: Any) -> ScriptedEngine:
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, seed: ids, **kwargs)
    asyncio.run(engine.load_weights(3, None))  # type: ignore[arg-type]
    return engine


def run(environment: Environment, tokenizer: Any, engine: ScriptedEngine | None = None, **kwargs: Any) -> Trajectory:
    rollout = make_rollout({"e": environment}, tokenizer, SamplingParams(), **kwargs)
    engine = engine or answer_engine(tokenizer)

    async def go() -> Trajectory:
        return await rollout(task(), engine)

    return asyncio.run(go())


def test_trajectory_of_a_single_turn(tokenizer: Any) -> None:
    before = time.time()
    t = run(Question(lambda p, c: Reward(0.5, {"format": 1})), tokenizer)
    assert (t.sample_index, t.attempt, t.reward, t.reward_parts, t.completion) == (0, 2, 0.5, {"format": 1.0}, "42")
    assert t.head == t.tail == 3
    assert t.trainable_tokens == len(t.token_ids) - t.prompt_length == 3
    assert len(t.token_ids) == len(t.loss_mask) == len(t.logprobs)
    assert before <= t.started_s <= t.ended_s <= time.time()


class MultiTurn(Environment):
    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{}]

    async def rollout(self, prompt: Mapping[str, Any], chat: Any) -> float:
        await chat.generate("one")
        return float(len(await chat.generate("two")))


class Blocking(Environment):
    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{}]

    def rollout(self, prompt: Mapping[str, Any], chat: Any) -> float:
        assert threading.current_thread().daemon
        chat.generate("one")
        chat.add("two")
        return float(len(chat.generate()))


@pytest.mark.parametrize("environment", [MultiTurn(), Blocking()])
def test_async_and_plain_rollouts(tokenizer: Any, environment: Environment) -> None:
    t = run(environment, tokenizer)
    assert (t.turns, t.reward, len(t.segments)) == (2, 2.0, 2)


class Counter:
    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        return float(completion) / 42


class AsyncCounter:
    async def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        await asyncio.sleep(0)
        return float(completion) / 42


async def async_reward(prompt: Mapping[str, Any], completion: str, scale: float = 42) -> float:
    return float(completion) / scale


def plain_reward(scale: float, prompt: Mapping[str, Any], completion: str) -> float:
    return float(completion) / scale


@pytest.mark.parametrize(
    "reward",
    [
        functools.partial(plain_reward, 42),
        lambda p, c: 1.0,
        Counter(),
        AsyncCounter(),
        async_reward,
        functools.partial(async_reward, scale=42),
        lambda p, c: async_reward(p, c),
    ],
)
def test_rewards_given_as_any_kind_of_callable(tokenizer: Any, reward: Any) -> None:
    """CASES 31."""
    assert run(Question(reward), tokenizer).reward == 1.0


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (2, 2.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.array(3), 3.0),
        (np.bool_(True), 1.0),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([1], dtype=torch.int64), 1.0),
        (torch.tensor(0.5, requires_grad=True), 0.5),
        (Fraction(1, 2), 0.5),
        (Reward(torch.tensor(2.0)), 2.0),  # type: ignore[arg-type]
    ],
)
def test_numbers_of_every_kind_are_taken(value: Any, number: float) -> None:
    """CASES 30."""
    reward = to_reward(value, {}, "")
    assert reward.value == number
    assert type(reward.value) is float


@pytest.mark.parametrize(
    "value",
    [
        None, float("nan"), float("inf"), "1.0", b"1", [1.0], {"a": 1.0}, 1j, np.array([1.0, 2.0]), torch.ones(2),
        torch.tensor(float("nan")), np.float64("-inf"), Reward(None), Reward(1.0, {"part": float("nan")}), object(),
    ],
)  # fmt: skip
def test_what_is_no_finite_number_is_a_failed_sample_that_shows_itself(tokenizer: Any, value: Any) -> None:
    """CASES 30."""
    with pytest.raises(RewardError, match=r"finite number.*'q': 'hi'.*42") as caught:
        run(Question(lambda p, c: value), tokenizer)
    assert caught.value.reason == "reward"


def test_an_exception_of_the_environment_comes_out_as_it_is(tokenizer: Any) -> None:
    def broken(prompt: Any, completion: str) -> float:
        raise KeyError("gold")

    with pytest.raises(KeyError, match="gold"):
        run(Question(broken), tokenizer)

    def leaves(prompt: Any, completion: str) -> float:
        sys.exit(3)

    with pytest.raises(RuntimeError, match="SystemExit"):
        run(Question(leaves), tokenizer)


def test_a_blocking_reward_does_not_hold_up_other_rollouts(tokenizer: Any) -> None:
    """CASES 5: eight rewards on one event loop, each of which blocks until all of them do."""
    together = threading.Barrier(8, timeout=60)
    rollout = make_rollout({"e": Question(lambda p, c: float(together.wait() < 8))}, tokenizer, SamplingParams())
    engine = answer_engine(tokenizer)

    async def go() -> list[Trajectory]:
        return await asyncio.gather(*(rollout(task(sample_index=i), engine) for i in range(8)))

    assert [t.reward for t in asyncio.run(go())] == [1.0] * 8
    assert len({r.request_id for r in engine.requests}) == 8


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_reward_past_its_deadline_is_a_timeout_never_zero(tokenizer: Any, kind: str) -> None:
    released = threading.Event()

    async def hangs(prompt: Any, completion: str) -> float:
        await asyncio.sleep(60)
        return 0.0

    reward = hangs if kind == "async" else (lambda p, c: released.wait(60))
    with pytest.raises(RewardTimeoutError, match=r"0\.05 s.*'q': 'hi'") as caught:
        run(Question(reward), tokenizer, reward_timeout_s=0.05)
    assert caught.value.reason == "timeout"
    released.set()


def test_the_rewards_own_timeout_error_is_an_ordinary_failure(tokenizer: Any) -> None:
    def times_out(prompt: Any, completion: str) -> float:
        raise TimeoutError("the judge is down")

    with pytest.raises(TimeoutError, match="the judge is down"):
        run(Question(times_out), tokenizer)


class Silent(Environment):
    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{}]

    async def rollout(self, prompt: Mapping[str, Any], chat: Any) -> float:
        return 1.0


def test_a_rollout_without_a_model_turn_is_refused(tokenizer: Any) -> None:
    with pytest.raises(RolloutError, match=r"Silent\.rollout returned without a model turn"):
        run(Silent(), tokenizer)


@pytest.mark.parametrize("environment", [Question(), MultiTurn(), Blocking()])
def test_cancelling_aborts_the_request(tokenizer: Any, environment: Environment) -> None:
    engine = answer_engine(tokenizer, latency_s=60)
    rollout = make_rollout({"e": environment}, tokenizer, SamplingParams())

    async def go() -> None:
        attempt = asyncio.ensure_future(rollout(task(), engine))
        while not engine.requests:
            await asyncio.sleep(0.001)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        while not engine.aborted:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(go(), 5))
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_hanging_reward_does_not_keep_the_interpreter_alive() -> None:
    script = """
        import asyncio, time
        from async_rl.environments.offload import call_user
        async def main():
            try:
                await asyncio.wait_for(call_user(time.sleep, 600), 0.05)
            except TimeoutError:
                print("gave up")
        asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "gave up\n"), done.stderr


def test_importing_environments_is_cheap() -> None:
    script = (
        "import sys, async_rl.environments; "
        "print(sorted({'torch', 'transformers', 'vllm', 'pyarrow', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
