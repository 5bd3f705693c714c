"""Calculator: word problems with numbers too large to work out in one's head, and a calculator to call."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from async_rl.environments.expression import evaluate, show
from async_rl.environments.numbers import last_number
from async_rl.environments.tool_calls import ToolCall
from async_rl.environments.tools import ToolEnvironment

if TYPE_CHECKING:
    from async_rl.environments.chat import Chat

# A question, and what it asks to be computed.
_PROBLEMS = (
    ("{a} boxes hold {b} pens each. {c} pens are lost. How many are left?", "{a}*{b}-{c}"),
    ("{a} shelves hold {b} books each. {c} more lie on a table. How many books are there?", "{a}*{b}+{c}"),
    ("Anna has {a} stamps. She gets {b} more every week for {c} weeks. How many has she then?", "{a}+{b}*{c}"),
    ("A shop gets {a} apples and sells {b} a day for {c} days. How many are left?", "{a}-{b}*{c}"),
)


class Calculator(ToolEnvironment):
    """Word problems of two steps, with the tool ``calculate``; 1 if the last number of the answer is right, else 0.

    The tool reads arithmetic with a parser of its own (see :mod:`async_rl.environments.expression`); nothing the model
    writes is evaluated.

    Args:
        train_size: Training problems, >= 1.
        eval_size: Evaluation problems, >= 1; none of them is trained on.
        seed: Makes the problems.
        tool_latency_s: Mean time the tool takes, in seconds, >= 0; drawn log-normally anew for every call.
        tool_latency_sigma: Shape of its tail, >= 0; 1 is heavy (the largest of 64 is about seven times the mean).
        name: Name for metrics and the ledger.

    Raises:
        ValueError: a number out of range.
    """

    def __init__(
        self,
        train_size: int = 2000,
        eval_size: int = 100,
        seed: int = 0,
        tool_latency_s: float = 0.0,
        tool_latency_sigma: float = 1.0,
        name: str = "calculator",
    ) -> None:
        for key, value, least in (
            ("train_size", train_size, 1),
            ("eval_size", eval_size, 1),
            ("tool_latency_s", tool_latency_s, 0),
            ("tool_latency_sigma", tool_latency_sigma, 0),
        ):
            if not least <= value < math.inf:
                raise ValueError(f"environment.{key}={value}: must be >= {least}")
        self.name = name
        self._latency_s = tool_latency_s
        self._sigma = tool_latency_sigma
        self._random = random.Random(seed)
        made = _problems(random.Random(seed), train_size + eval_size)
        self._eval, self._train = made[:eval_size], made[eval_size:]

    @override
    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Mapping[str, Any]]:
        return self._train if split == "train" else self._eval

    @override
    def messages(self, prompt: Mapping[str, Any]) -> str:
        return str(prompt["question"])

    @override
    def tools(self, prompt: Mapping[str, Any]) -> Sequence[Callable[..., Any]]:
        return [self.calculate]

    async def calculate(self, expression: str) -> str:
        """Computes.

        Args:
            expression: Like 12*(3+4).
        """
        if self._latency_s:
            mu = math.log(self._latency_s) - self._sigma**2 / 2
            await asyncio.sleep(self._random.lognormvariate(mu, self._sigma))
        return show(evaluate(expression))

    @override
    def reward(self, prompt: Mapping[str, Any], completion: str, chat: Chat) -> float:
        return float(last_number(completion) == int(prompt["answer"]))

    def demonstrate(self, prompt: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str | ToolCall:
        """What a good model would write next (see :func:`~async_rl.warm_up.warm_up`).

        Args:
            prompt: The task.
            messages: The conversation so far.
        """
        last = messages[-1]
        if last["role"] == "tool":
            return str(last["content"])
        return ToolCall("calculate", {"expression": prompt["expression"]})


def _problems(rng: random.Random, count: int) -> list[dict[str, str]]:
    """Different problems."""
    made: dict[str, dict[str, str]] = {}
    while len(made) < count:
        question, expression = rng.choice(_PROBLEMS)
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        if "{a}-" in expression:
            a += b * c  # nothing goes below 0
        numbers = {"a": a, "b": b, "c": c}
        expression = expression.format(**numbers)
        question = question.format(**numbers)
        made[question] = {"question": question, "expression": expression, "answer": show(evaluate(expression))}
    return list(made.values())
