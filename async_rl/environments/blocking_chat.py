"""BlockingChat: the same conversation for environments whose ``rollout`` is a plain ``def``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from async_rl.environments.budget import ChatBudget
from async_rl.environments.chat import Chat, Message
from async_rl.environments.tool_calls import MalformedCall, ToolCall


class BlockingChat:
    """The same conversation for an environment's plain ``def rollout``, which runs in a thread of its own.

    Args:
        chat: The conversation; its coroutines run on ``loop``.
        loop: The running event loop of the rollout, of the calling thread.
    """

    def __init__(self, chat: Chat, loop: asyncio.AbstractEventLoop) -> None:
        self._chat = chat
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._lock = threading.Lock()
        self._running: Future[str] | None = None
        self._cancelled = False

    def add(self, message: Message | str) -> None:
        """See :meth:`Chat.add`."""
        self._chat.add(message)

    def offer(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`Chat.offer`."""
        self._chat.offer(tools)

    def generate(self, messages: Sequence[Message] | str | None = None, **overrides: Any) -> str:
        """See :meth:`Chat.generate`.

        Raises:
            RolloutCancelled: nobody waits for this attempt any more.
        """
        if threading.get_ident() == self._loop_thread:
            raise RuntimeError(
                "a blocking chat was used on the event loop: `rollout` returns a coroutine without being `async def` "
                "(a decorator?); declare it `async def`"
            )
        with self._lock:
            if self._cancelled:
                raise RolloutCancelled
            running = self._running = asyncio.run_coroutine_threadsafe(
                self._chat.generate(messages, **overrides), self._loop
            )
        try:
            return running.result()
        except BaseException as error:
            if self._cancelled:
                raise RolloutCancelled from error
            raise

    def cancel(self) -> None:
        """Abort the turn being sampled and refuse further ones. Called from the rollout's loop."""
        with self._lock:
            self._cancelled = True
            if self._running is not None:
                self._running.cancel()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        return self._chat.messages

    @property
    def token_ids(self) -> list[int]:
        """All tokens so far."""
        return self._chat.token_ids

    @property
    def turns(self) -> int:
        """Model turns so far."""
        return self._chat.turns

    @property
    def finish_reason(self) -> str:
        """How the last turn ended."""
        return self._chat.finish_reason

    @property
    def completion(self) -> str:
        """Text of the last turn."""
        return self._chat.completion

    @property
    def calls(self) -> tuple[ToolCall | MalformedCall, ...]:
        """See :attr:`Chat.calls`."""
        return self._chat.calls

    @property
    def budget(self) -> ChatBudget:
        """What is left."""
        return self._chat.budget


class RolloutCancelled(BaseException):
    """Ends the thread of a cancelled ``def rollout``; no ``Exception``, so that user code does not swallow it."""
