"""The Environment API: what a user writes to say what the tasks are and how an attempt is scored."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from async_rl.environments.offload import call_user
from async_rl.types import SettingError

if TYPE_CHECKING:
    from async_rl.environments.chat import Chat


@dataclass(frozen=True, slots=True)
class Reward:
    """A score with named parts (the parts are logged, only ``value`` is trained on)."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class RolloutError(RuntimeError):
    """An attempt that failed for a reason the run can count.

    Attributes:
        reason: Short and stable, for the ledger and metrics: ``"rollout"``, ``"reward"``, ``"timeout"``,
            ``"template"``, ``"budget"`` or ``"context"``.
    """

    reason = "rollout"


class RewardError(RolloutError):
    """A reward that is no finite number; the message shows the sample."""

    reason = "reward"


class RewardTimeoutError(RolloutError):
    """A reward that did not come within its deadline: a failed sample, never a reward of 0."""

    reason = "timeout"


class ToolError(Exception):
    """What a tool raises to tell the model what is wrong with its call; other exceptions are logged, too."""


class Environment(ABC):
    """Tasks, and one complete attempt at one of them.

    ``rollout`` may be ``async def`` (it runs on a shared event loop: don't block) or a plain ``def`` (it gets a thread
    and a blocking ``chat``). It may raise (the attempt is retried) and it may hang (it has a deadline).
    """

    name: str = ""
    """Short name for metrics and the ledger; the class name in lower case when empty."""

    @abstractmethod
    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Mapping[str, Any]]:
        """The rows of a split. Called once per split, before any engine starts."""

    @abstractmethod
    def rollout(self, prompt: Mapping[str, Any], chat: Chat) -> float | Reward | Awaitable[float | Reward]:
        """Attempt ``prompt`` through ``chat`` and return the score."""


def by_name(environment: Environment | Mapping[str, Environment]) -> dict[str, Environment]:
    """One environment under its own name, or several under those given."""
    if isinstance(environment, Environment):
        return {environment.name or type(environment).__name__.lower(): environment}
    return dict(environment)


def rows_of(environment: Environment, name: str, split: Literal["train", "eval"]) -> Sequence[Mapping[str, Any]]:
    """The rows of a split.

    Raises:
        SettingError: What ``prompts`` returned has no length, or no places; names the environment.
    """
    rows: Any = environment.prompts(split)
    if isinstance(rows, str | Mapping) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        given = "None" if rows is None else f"a {type(rows).__name__}"
        raise SettingError(
            f"environment {name!r}: {type(environment).__name__}.prompts({split!r}) returned {given}; return a list "
            "with a mapping for each prompt" + (", [] for none" if split == "eval" else "")
        )
    return rows  # type: ignore[no-any-return]


class SingleTurn(Environment):
    """An environment of one question and one answer: write ``prompts``, ``messages`` and ``reward``.

    Both methods may block: they run off the event loop. ``reward`` may also be ``async def``; it has a deadline
    (``rollout.reward_timeout_s``).

    Example::

        class Shout(SingleTurn):
            def prompts(self, split):
                return [{"word": w} for w in ("tree", "river")]

            def messages(self, prompt):
                return [{"role": "user", "content": f"Write {prompt['word']} in capitals."}]

            def reward(self, prompt, completion):
                return float(prompt["word"].upper() in completion)
    """

    @abstractmethod
    def messages(self, prompt: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | str:
        """The conversation to answer, as role/content messages; a string is one user message."""

    @abstractmethod
    def reward(self, prompt: Mapping[str, Any], completion: str) -> float | Reward | Awaitable[float | Reward]:
        """Score the model's answer."""

    @override
    async def rollout(self, prompt: Mapping[str, Any], chat: Chat) -> float | Reward:
        """Ask once, score once.

        Raises:
            RewardTimeoutError: ``reward`` took longer than ``chat.reward_timeout_s`` seconds.
        """
        completion = await chat.generate(await call_user(self.messages, prompt))
        score: float | Reward = await call_reward(self.reward, prompt, completion, timeout_s=chat.reward_timeout_s)
        return score


async def call_reward(
    reward: Callable[..., Any], prompt: Mapping[str, Any], completion: str, *more: Any, timeout_s: float
) -> Any:
    """Call an environment's ``reward(prompt, completion, *more)`` of any kind, off the event loop, under a deadline.

    Raises:
        RewardTimeoutError: it took longer than ``timeout_s`` seconds.
    """
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await call_user(reward, prompt, completion, *more)
    except TimeoutError as error:
        if not deadline.expired():  # the reward's own TimeoutError is an ordinary failure
            raise
        raise RewardTimeoutError(
            f"{getattr(reward, '__qualname__', reward)} took more than {timeout_s:g} s; make it faster or raise "
            f"rollout.reward_timeout_s. Prompt: {shorten(prompt)}. Completion: {shorten(completion)}"
        ) from error


def shorten(value: object, limit: int = 400) -> str:
    """``repr`` of a sample for an error message, cut in the middle beyond ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
