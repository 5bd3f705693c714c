"""Traces: complete, scored conversations of an environment in which a demonstrator plays the model."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from async_rl.engines.base import Generation, GenerationRequest, SamplingParams
from async_rl.environments.base import Environment, rows_of, shorten
from async_rl.environments.chat import Chat
from async_rl.environments.rollout import attempt, to_reward
from async_rl.environments.template import ChatTemplate
from async_rl.environments.tool_calls import ToolCall
from async_rl.types import Segment

log = logging.getLogger(__name__)


@runtime_checkable
class Demonstrator(Protocol):
    """What an environment has that can show what a good model would write."""

    def demonstrate(self, prompt: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str | ToolCall:
        """The model's next turn: its text, or a tool call, which is written in the model's own format.

        Args:
            prompt: The task.
            messages: The conversation so far; the last one is to be answered.
        """
        ...


@dataclass(frozen=True, slots=True)
class Trace:
    """One demonstrated attempt, in the tokens it would have as a rollout.

    Attributes:
        token_ids: The conversation, ``[seq]``.
        loss_mask: 1 for the tokens of the model's turns, those that end them included, else 0, ``[seq]``.
    """

    token_ids: list[int]
    loss_mask: list[int]


def demonstrate(
    environments: Mapping[str, Environment], tokenizer: Any, count: int, *, seed: int = 0, max_tokens: int = 512
) -> list[Trace]:
    """Make traces of training prompts, the environments taking turns.

    The environment's own ``rollout`` runs, with its tools and its reward; only the engine is a stand-in that writes
    what the environment demonstrates. So a trace is, token by token, what a perfect rollout would be.

    Args:
        environments: The environments by name; those without ``demonstrate`` are left out.
        tokenizer: The policy's Hugging Face tokenizer.
        count: How many, >= 1.
        seed: Picks the prompts.
        max_tokens: Longest turn that may be demonstrated.

    Raises:
        ValueError: no environment demonstrates anything, or a demonstration does not get the reward.
    """
    able = {name: e for name, e in environments.items() if isinstance(e, Demonstrator)}
    if not able:
        raise ValueError(
            f"none of the environments {', '.join(environments)} has a method demonstrate(prompt, messages), so there "
            "is nothing to warm the model up on; add one, or set model.warm_up=null"
        )
    rows = {name: list(rows_of(e, name, "train")) for name, e in able.items()}
    for name in rows:
        random.Random(f"{seed}/{name}").shuffle(rows[name])
    names = list(able)
    picked = [(n := names[i % len(names)], rows[n][i // len(names) % len(rows[n])]) for i in range(count)]
    template, sampling = ChatTemplate(tokenizer), SamplingParams(max_tokens=max_tokens)

    async def trace_all() -> list[Trace]:
        return [await _trace(able[name], row, template, tokenizer, sampling) for name, row in picked]

    return asyncio.run(trace_all())


async def _trace(
    environment: Any, prompt: Mapping[str, Any], template: ChatTemplate, tokenizer: Any, sampling: SamplingParams
) -> Trace:
    engine = _DemonstratingEngine(environment, prompt, tokenizer, template)
    chat = engine.chat = Chat(engine, template, sampling, seed=0)  # type: ignore[arg-type]
    reward = to_reward(await attempt(environment, prompt, chat), prompt, chat.completion)
    if not reward.value > 0:
        raise ValueError(
            f"{type(environment).__name__}.demonstrate gets a reward of {reward.value:g}, so the model would learn "
            f"something wrong; does it return tool calls as ToolCall(name, arguments)? Prompt: {shorten(prompt)}. "
            f"Conversation: {shorten(chat.messages)}"
        )
    if failed := [f"{n:g} {name}" for name in ("tool_errors", "tool_timeouts") if (n := reward.parts.get(name, 0))]:
        log.warning(
            "a demonstration has %s, which the model will learn from: %s", *(" and ".join(failed), shorten(prompt))
        )
    if len(chat.starts) > 1:
        raise ValueError("the chat template rewrites earlier turns, which a demonstration cannot follow")
    return Trace(chat.token_ids, chat.loss_mask)


class _DemonstratingEngine:
    """Stands in for the engine of one attempt."""

    name = "demonstration"

    def __init__(
        self, environment: Demonstrator, prompt: Mapping[str, Any], tokenizer: Any, template: ChatTemplate
    ) -> None:
        self._environment = environment
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._template = template
        self.chat: Chat

    async def generate(self, request: GenerationRequest) -> Generation:
        turn = self._environment.demonstrate(self._prompt, self.chat.messages)
        text = self._template.write(turn) if isinstance(turn, ToolCall) else turn
        token_ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        if len(token_ids) > request.sampling.max_tokens:
            raise ValueError(
                f"a demonstrated turn has {len(token_ids)} tokens, the longest may have {request.sampling.max_tokens}; "
                "raise rollout.sampling.max_tokens"
            )
        return Generation(token_ids, [0.0] * len(token_ids), (Segment(None, 0, len(token_ids)),), "stop")
