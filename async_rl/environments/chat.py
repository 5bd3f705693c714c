"""Chat: one attempt's conversation, token ids in and token ids out."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from async_rl.engines.base import Engine, EngineError, Generation, GenerationRequest, SamplingParams
from async_rl.environments.base import RolloutError
from async_rl.environments.template import ChatTemplate
from async_rl.types import Segment

Message = Mapping[str, Any]

_request_numbers = itertools.count()  # keeps request ids unique in the process whatever the group is called

# What changes the distribution tokens are drawn from: the trainer evaluates every token under the run's own values.
_FIXED = ("temperature", "top_p", "top_k", "min_p")


class ContextFullError(RolloutError):
    """The conversation leaves no room for another token."""

    reason = "context"


class Chat:
    """A conversation that keeps exactly the tokens the engine saw and returned.

    The first messages are rendered through the chat template; what the model samples is appended as returned and never
    decoded and encoded again; later messages are appended by rendering only what they add. The token that ends a turn,
    when the model sampled it, is trained; everything the template adds is not.

    Args:
        engine: Samples the turns.
        template: Renders the messages.
        sampling: How to sample, for every turn.
        seed: Seed of the attempt; each turn gets its own, derived from it.
        request_prefix: Start of the request ids, for logs.
        max_context: Most tokens of the whole conversation; ``None`` for no limit.
        reward_timeout_s: Deadline of one reward call, for environments that keep one.

    Attributes:
        messages: The conversation so far, model turns included.
        token_ids: All tokens in order, ``[seq]``.
        loss_mask: 1 where the model sampled the token, ``[seq]``.
        logprobs: Behaviour log-probabilities, 0.0 where nothing was sampled, ``[seq]``.
        segments: Which version sampled what; ranges index ``token_ids``.
        prompt_length: Tokens before the first sampled one.
        turns: Model turns so far.
        finish_reason: How the last turn ended: ``"stop"``, ``"length"``; empty before the first.
        completion: Text of the last turn.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        sampling: SamplingParams,
        *,
        seed: int,
        request_prefix: str = "chat",
        max_context: int | None = None,
        reward_timeout_s: float = 60.0,
    ) -> None:
        self._engine = engine
        self._template = template
        self._sampling = sampling
        self._seed = seed
        self._request_prefix = request_prefix
        self._max_context = max_context
        self.reward_timeout_s = reward_timeout_s
        self._prompt_text = ""  # what the template renders for everything before the last turn
        self.messages: list[dict[str, Any]] = []
        self.token_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.segments: list[Segment] = []
        self.prompt_length = 0
        self.turns = 0
        self.finish_reason = ""
        self.completion = ""

    def add(self, message: Message | str) -> None:
        """Append a message (a string is a user message); the next :meth:`generate` renders it."""
        message = {"role": "user", "content": message} if isinstance(message, str) else dict(message)
        if "role" not in message:
            raise ValueError(f"a message needs a role and a content, got {message!r}")
        self.messages.append(message)

    async def generate(self, messages: Sequence[Message] | str | None = None, **overrides: Any) -> str:
        """Append ``messages`` and sample the model's turn.

        Args:
            messages: What to add first; a string is one user message.
            **overrides: ``max_tokens`` and ``stop`` for this turn only.

        Returns:
            Text of the turn, without special tokens and without the stop string.

        Raises:
            ContextFullError: no room for another token within ``max_context``.
            TemplateError: the template rewrites earlier turns.
            EngineError: the engine died, or broke its contract.
            ValueError: an override that would change the distribution tokens are drawn from, or nothing to answer.
        """
        sampling = self._turn_sampling(overrides)
        for message in [messages] if isinstance(messages, str) else messages or ():
            self.add(message)
        self._append_messages()
        room = self.room
        if room is not None and room < 1:
            raise ContextFullError(
                f"the conversation has {len(self.token_ids)} tokens and max_context is {self._max_context}: no room "
                "for another turn; shorten the prompt, end the rollout earlier (chat.room) or raise the model length"
            )
        if room is not None and room < sampling.max_tokens:
            sampling = dataclasses.replace(sampling, max_tokens=room)
        request = GenerationRequest(
            request_id=f"{self._request_prefix}-t{self.turns}-{next(_request_numbers)}",
            prompt_token_ids=tuple(self.token_ids),
            sampling=sampling,
            seed=turn_seed(self._seed, self.turns),
        )
        generation = await self._engine.generate(request)
        return self._append_turn(generation, sampling)

    @property
    def room(self) -> int | None:
        """Tokens that still fit, ``None`` without a limit."""
        return None if self._max_context is None else self._max_context - len(self.token_ids)

    def _turn_sampling(self, overrides: Mapping[str, Any]) -> SamplingParams:
        if fixed := [k for k in overrides if k in _FIXED]:
            raise ValueError(
                f"chat.generate({fixed[0]}=...): {', '.join(_FIXED)} are the same for every turn, because the trainer "
                "computes the policy's log-probabilities under the run's values; set them under `sampling`"
            )
        try:
            return dataclasses.replace(self._sampling, **overrides)
        except TypeError:
            unknown = [k for k in overrides if k not in SamplingParams.__dataclass_fields__]
            raise ValueError(f"chat.generate({unknown[0]}=...): unknown; a turn can set max_tokens and stop") from None

    def _append_messages(self) -> None:
        """Append the tokens of the messages that are not in ``token_ids`` yet, and of the next turn's opening."""
        if not self.messages or self.messages[-1]["role"] == "assistant":
            raise ValueError("nothing to answer: pass messages to chat.generate() or chat.add() one first")
        if self.turns == 0:
            self._prompt_text = self._template.render(self.messages)
            new = self._template.encode(self._prompt_text)
            self.prompt_length = len(new)
        else:
            # Only a turn the model ended itself has a closing token; a special token elsewhere is just a token.
            ended = self.finish_reason == "stop" and self.segments and self.segments[-1].end == len(self.token_ids)
            last = self.token_ids[-1] if ended else None
            self._prompt_text, new = self._template.continuation(
                self._prompt_text, self.completion, last, self.messages
            )
        self.token_ids += new
        self.loss_mask += [0] * len(new)
        self.logprobs += [0.0] * len(new)

    def _append_turn(self, generation: Generation, sampling: SamplingParams) -> str:
        count, start = len(generation.token_ids), len(self.token_ids)
        stamped = [i for s in generation.segments for i in range(s.start, s.end)]
        if len(generation.logprobs) != count or stamped != list(range(count)):
            raise EngineError(
                f"{self._engine.name} returned {count} tokens, {len(generation.logprobs)} log-probabilities and "
                f"segments {generation.segments}; every token needs one of each"
            )
        self.token_ids += generation.token_ids
        self.loss_mask += [1] * count
        self.logprobs += generation.logprobs
        self.segments += [Segment(s.version, start + s.start, start + s.end) for s in generation.segments]
        self.turns += 1
        self.finish_reason = generation.finish_reason
        text = self._template.decode(generation.token_ids)
        cuts = [at for s in sampling.stop if (at := text.find(s)) >= 0]
        self.completion = text[: min(cuts)] if cuts else text
        self.messages.append({"role": "assistant", "content": self.completion})
        return self.completion


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
    def room(self) -> int | None:
        """Tokens that still fit, ``None`` without a limit."""
        return self._chat.room


class RolloutCancelled(BaseException):
    """Ends the thread of a cancelled ``def rollout``; no ``Exception``, so that user code does not swallow it."""


def turn_seed(seed: int, turn: int) -> int:
    """Sampling seed of one turn, in ``[0, 2**63)``: a hash of the attempt's seed and the turn's number."""
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
