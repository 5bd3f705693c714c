"""Rubric: weighted rewards, whose parts keep their names."""

from __future__ import annotations

import asyncio
import functools
import math
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from hydra.utils import instantiate

from async_rl.environments import Reward, RewardError, Rubric


def length(prompt: Mapping[str, Any], completion: str, scale: float = 1.0) -> float:
    return len(completion) * scale


async def alength(prompt: Mapping[str, Any], completion: str) -> float:
    return len(completion)


class Length:
    def __call__(self, prompt: Mapping[str, Any], completion: str) -> int:
        return len(completion)


def with_chat(prompt: Mapping[str, Any], completion: str, chat: Any) -> float:
    return float(chat.turns)


def score(rubric: Rubric, *more: Any) -> Reward:
    return asyncio.run(rubric({"n": 1}, "abcd", *more))


@pytest.mark.parametrize("part", [length, functools.partial(length, scale=1.0), Length(), alength, lambda p, c: len(c)])
def test_every_kind_of_function_under_the_name_given(part: Any) -> None:
    """CASES 31."""
    reward = score(Rubric({"size": (part, 0.5), "one": lambda p, c: True}))
    assert reward.value == 3.0
    assert reward.parts == {"size": 4.0, "one": 1.0}


def test_parts_that_take_the_chat_get_it_and_the_others_do_not() -> None:
    class Chat:
        turns = 7

    rubric = Rubric({"turns": with_chat, "size": length, "all": lambda *a: len(a)})
    assert score(rubric, Chat()).parts == {"turns": 7.0, "size": 4.0, "all": 3.0}


def test_a_part_may_have_parts_and_negative_weights_subtract() -> None:
    inner = Rubric({"a": lambda p, c: 2, "b": lambda p, c: 3})
    reward = score(Rubric({"inner": (inner, 2), "cost": (length, -1)}))
    assert reward.value == 6.0
    assert reward.parts == {"inner": 5.0, "inner/a": 2.0, "inner/b": 3.0, "cost": 4.0}


def test_blocking_parts_run_side_by_side() -> None:
    barrier = threading.Barrier(3, timeout=60)
    rubric = Rubric({name: lambda p, c: float(barrier.wait() >= 0) for name in "abc"})
    assert score(rubric).value == 3.0


@pytest.mark.parametrize("bad", [None, math.nan, "1"])
def test_a_part_that_is_no_number_is_named(bad: Any) -> None:
    """CASES 30."""
    with pytest.raises(RewardError, match="the part 'broken' of the rubric: a reward must be a finite number"):
        score(Rubric({"fine": length, "broken": lambda p, c: bad}))


def test_what_a_part_raises_is_raised() -> None:
    told = threading.Event()

    def broken(prompt: Any, completion: str) -> float:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):  # while another part still runs
        score(Rubric({"slow": lambda p, c: float(told.wait(600)), "broken": broken}))
    told.set()


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({}, "needs parts"),
        ([length], "needs parts"),
        ({"a": 3}, "'a': 3 cannot be called"),
        ({"a": (length, "big")}, "'a': weight='big'"),
        ({"a": (length, math.inf)}, "weight=inf"),
        ({"a": {"reward": length, "wieght": 2}}, "there is no 'wieght'"),
        ({"a": {"weight": 2}}, "None cannot be called"),
    ],
)
def test_a_rubric_that_cannot_work_is_refused(parts: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Rubric(parts)


def test_as_the_reward_of_a_task_from_a_config() -> None:
    part = {"_target_": f"{__name__}.length", "_partial_": True}
    task = instantiate(
        {
            "_target_": "async_rl.environments.Task",
            "rows": [{"word": "tree"}],
            "messages": "Write {word}.",
            "reward": {
                "_target_": "async_rl.environments.Rubric",
                "parts": {"size": part, "half": {"reward": part, "weight": 0.5}},
            },
        }
    )
    reward = asyncio.run(task.reward({"word": "tree"}, "abcd"))
    assert (reward.value, reward.parts) == (6.0, {"size": 4.0, "half": 4.0})
