"""Runs one attempt: a task, an engine and an environment in; a finished, scored trajectory out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

from async_rl.engines.base import Engine, SamplingParams
from async_rl.environments.base import Environment, Reward, RewardError, RolloutError, shorten
from async_rl.environments.blocking_chat import BlockingChat
from async_rl.environments.budget import BudgetLimits
from async_rl.environments.chat import Chat
from async_rl.environments.offload import call_user, is_async
from async_rl.environments.template import ChatTemplate
from async_rl.types import RolloutTask, Trajectory

RolloutFunction = Callable[[RolloutTask, Engine], Awaitable[Trajectory]]


def make_rollout(
    environments: Mapping[str, Environment],
    tokenizer: Any,
    sampling: SamplingParams,
    *,
    reward_timeout_s: float = 60.0,
    limits: BudgetLimits | None = None,
    template_rewrite: Literal["refuse", "split"] = "refuse",
) -> RolloutFunction:
    """Make the function the dispatcher calls for every attempt.

    The function is stateless between calls and may run on many event loops at once. Whatever goes wrong in it is
    raised; retries and deadlines are the caller's. Cancelling it aborts the request in the engine.

    Args:
        environments: The environments by name; a task runs in the one its prompt names.
        tokenizer: The Hugging Face tokenizer of the policy, with a chat template.
        sampling: How to sample every turn.
        reward_timeout_s: Deadline of one reward call.
        limits: What one attempt may use; default: no limit but the engine's context.
        template_rewrite: What to do where the chat template rewrites earlier turns: fail the attempt (``"refuse"``), or
            go on in a fresh context that is trained as a sequence of its own (``"split"``).

    Raises:
        TemplateError: the tokenizer has no chat template.
    """
    template = ChatTemplate(tokenizer)

    async def rollout(task: RolloutTask, engine: Engine) -> Trajectory:
        started_s = time.time()
        environment = environments[task.prompt.environment]
        chat = Chat(
            engine,
            template,
            sampling,
            seed=task.seed,
            request_prefix=f"g{task.group_id}-s{task.sample_index}-a{task.attempt}",
            limits=limits,
            template_rewrite=template_rewrite,
            reward_timeout_s=reward_timeout_s,
        )
        score = await attempt(environment, task.prompt.data, chat)
        if chat.turns == 0:
            raise RolloutError(
                f"{type(environment).__name__}.rollout returned without a model turn (was chat.generate awaited?): "
                f"nothing to train on. Prompt: {shorten(task.prompt.data)}"
            )
        reward = to_reward(score, task.prompt.data, chat.completion)
        return Trajectory(
            sample_index=task.sample_index,
            attempt=task.attempt,
            token_ids=chat.token_ids,
            loss_mask=chat.loss_mask,
            logprobs=chat.logprobs,
            segments=tuple(chat.segments),
            prompt_length=chat.prompt_length,
            reward=reward.value,
            reward_parts=reward.parts,
            finish_reason=chat.finish_reason,
            completion=chat.completion,
            turns=chat.turns,
            started_s=started_s,
            ended_s=time.time(),
            starts=tuple(chat.starts),
        )

    return rollout


async def attempt(environment: Environment, prompt: Mapping[str, Any], chat: Chat) -> Any:
    """Run an environment's ``rollout`` of any kind, ``async def`` or plain, and return its score."""
    if is_async(environment.rollout):
        try:
            return await environment.rollout(prompt, chat)  # type: ignore[misc]
        except (SystemExit, KeyboardInterrupt) as error:  # would end the event loop and every rollout on it
            raise RolloutError(f"{type(environment).__name__}.rollout raised {error!r}") from error
    blocking = BlockingChat(chat, asyncio.get_running_loop())
    try:
        return await call_user(environment.rollout, prompt, blocking)
    finally:
        blocking.cancel()


def to_reward(score: Any, prompt: Mapping[str, Any], completion: str) -> Reward:
    """Make a :class:`Reward` of whatever an environment returned.

    Args:
        score: A :class:`Reward`, or a number: bool, int, float, a numpy or torch value with one element.
        prompt: The sample, for the error.
        completion: The sample, for the error.

    Raises:
        RewardError: ``None``, NaN, an infinity, or no number at all; the message shows the sample.
    """
    reward = score if isinstance(score, Reward) else Reward(score)
    try:
        value = _number(reward.value)
        parts = {str(name): _number(part) for name, part in reward.parts.items()}
    except (TypeError, ValueError, RuntimeError) as error:  # torch's .item() raises RuntimeError
        raise RewardError(
            f"a reward must be a finite number, got {shorten(score)} ({error}). Prompt: {shorten(prompt)}. "
            f"Completion: {shorten(completion)}"
        ) from error
    return Reward(value, parts)


def _number(value: Any) -> float:
    if hasattr(value, "item"):  # numpy and torch values; more than one element is an error there
        value = value.item()
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{type(value).__name__} is no number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number
