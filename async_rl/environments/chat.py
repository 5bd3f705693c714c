"""Chat: one attempt's conversation, token ids in and token ids out."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from async_rl.engines.base import Engine, EngineError, Generation, GenerationRequest, SamplingParams
from async_rl.environments.budget import BudgetError, BudgetLimits, ChatBudget, ContextFullError
from async_rl.environments.template import ChatTemplate, Message, TemplateRewriteError, Turn
from async_rl.environments.tool_calls import MalformedCall, ToolCall
from async_rl.types import Segment

_request_numbers = itertools.count()  # keeps request ids unique in the process whatever the group is called

# What changes the distribution tokens are drawn from: the trainer evaluates every token under the run's own values.
_FIXED = ("temperature", "top_p", "top_k", "min_p")


class Chat:
    """A conversation that keeps exactly the tokens the engine saw and returned.

    The first messages are rendered through the chat template; what the model samples is appended as returned and never
    decoded and encoded again; later messages are appended by rendering only what they add. The token that ends a turn,
    when the model sampled it, is trained; everything the template adds is not. Where the template rewrites earlier
    turns, the attempt fails, or goes on in a fresh context that repeats, untrained, what the template makes of it.

    Args:
        engine: Samples the turns.
        template: Renders the messages.
        sampling: How to sample, for every turn.
        seed: Seed of the attempt; each turn gets its own, derived from it.
        request_prefix: Start of the request ids, for logs.
        limits: What the attempt may use; the context is that of the engine where it holds less (``max_context``).
        template_rewrite: What to do where the template rewrites earlier turns: ``"refuse"`` or ``"split"``.
        reward_timeout_s: Deadline of one reward call, for environments that keep one.

    Attributes:
        messages: The conversation so far, model turns included.
        token_ids: All tokens in order, context after context, ``[seq]``.
        starts: Where in ``token_ids`` each context begins; ``[0]`` unless the template rewrote earlier turns.
        loss_mask: 1 where the model sampled the token, ``[seq]``.
        logprobs: Behaviour log-probabilities, 0.0 where nothing was sampled, ``[seq]``.
        segments: Which version sampled what; ranges index ``token_ids``.
        prompt_length: Tokens before the first sampled one.
        turns: Model turns so far.
        finish_reason: How the last turn ended: ``"stop"``, ``"length"``; empty before the first.
        completion: Text of the last turn.
        calls: Tool calls in the last turn, in order; none where no tools were offered.
    """

    def __init__(
        self,
        engine: Engine,
        template: ChatTemplate,
        sampling: SamplingParams,
        *,
        seed: int,
        request_prefix: str = "chat",
        limits: BudgetLimits | None = None,
        template_rewrite: Literal["refuse", "split"] = "refuse",
        reward_timeout_s: float = 60.0,
    ) -> None:
        self._engine = engine
        self._template = template
        self._sampling = sampling
        self._seed = seed
        self._request_prefix = request_prefix
        self._limits = limits or BudgetLimits()
        self._engine_context: int | None = getattr(engine, "max_context", None)
        self._template_rewrite = template_rewrite
        self.reward_timeout_s = reward_timeout_s
        self._tools: tuple[Message, ...] = ()
        self._prompt_text = ""  # what the template renders for everything before the last turn
        self._turn_text = ""  # what the template should render for the last turn
        self.messages: list[dict[str, Any]] = []
        self.token_ids: list[int] = []
        self.starts: list[int] = [0]
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.segments: list[Segment] = []
        self.prompt_length = 0
        self.turns = 0
        self.finish_reason = ""
        self.completion = ""
        self.calls: tuple[ToolCall | MalformedCall, ...] = ()

    def offer(self, tools: Sequence[Message]) -> None:
        """Tell the model about tools, in its own format, from the first turn on.

        Args:
            tools: JSON schemas, as ``transformers.utils.get_json_schema`` makes them.

        Raises:
            RuntimeError: there was a turn already.
        """
        if self.turns:
            raise RuntimeError("chat.offer() comes before the first chat.generate(): earlier tokens can't be changed")
        self._tools = tuple(tools)

    def add(self, message: Message | str) -> None:
        """Append a message (a string is a user message); the next :meth:`generate` renders it."""
        self.messages.append(_as_message(message))

    async def generate(self, messages: Sequence[Message] | str | None = None, **overrides: Any) -> str:
        """Append ``messages`` and sample the model's turn.

        Args:
            messages: What to add first; a string is one user message.
            **overrides: ``max_tokens`` and ``stop`` for this turn only.

        Returns:
            Text of the turn, without special tokens and without the stop string.

        Raises:
            BudgetError: no turn, no token or (:class:`ContextFullError`) no room is left; nothing was appended.
            TemplateRewriteError: the template rewrites earlier turns, and ``template_rewrite`` is ``"refuse"``.
            TemplateError: the template can't render the conversation.
            EngineError: the engine died, or broke its contract.
            ValueError: an override that would change the distribution tokens are drawn from, or nothing to answer.
        """
        sampling = self._turn_sampling(overrides)
        more = [messages] if isinstance(messages, str) else messages or ()
        conversation = [*self.messages, *map(_as_message, more)]
        if not conversation or conversation[-1]["role"] == "assistant":
            raise ValueError("nothing to answer: pass messages to chat.generate() or chat.add() one first")
        self._check_turn_left()
        text, new, fresh = self._render(conversation)
        length = len(new) if fresh else self._context_length + len(new)
        self._check_context_left(length)
        self._append(conversation, text, new, fresh)
        request = GenerationRequest(
            request_id=f"{self._request_prefix}-t{self.turns}-{next(_request_numbers)}",
            prompt_token_ids=tuple(self.token_ids[self.starts[-1] :]),
            sampling=dataclasses.replace(sampling, max_tokens=self.budget.clip(sampling.max_tokens)),
            seed=turn_seed(self._seed, self.turns),
        )
        generation = await self._engine.generate(request)
        return self._append_turn(generation, sampling)

    @property
    def budget(self) -> ChatBudget:
        """What is left of the turns, the tokens and the context."""
        limits = self._limits
        return ChatBudget(
            turns=None if limits.max_turns is None else limits.max_turns - self.turns,
            tokens=None if limits.max_generated_tokens is None else limits.max_generated_tokens - sum(self.loss_mask),
            context=None if self._max_context is None else self._max_context - self._context_length,
        )

    @property
    def _max_context(self) -> int | None:
        return min((n for n in (self._limits.max_context, self._engine_context) if n is not None), default=None)

    @property
    def _context_length(self) -> int:
        return len(self.token_ids) - self.starts[-1]

    def _check_turn_left(self) -> None:
        left, limits = self.budget, self._limits
        for what, rest, key in (
            (f"turns of max_turns={limits.max_turns}", left.turns, "rollout.max_turns"),
            (
                f"tokens of max_generated_tokens={limits.max_generated_tokens}",
                left.tokens,
                "rollout.max_generated_tokens",
            ),
        ):
            if rest is not None and rest < 1:
                raise BudgetError(
                    f"no {what} are left after {self.turns} turns; end the rollout when chat.budget.exhausted, catch "
                    f"BudgetError, or raise {key}"
                )

    def _check_context_left(self, length: int) -> None:
        limit = self._max_context
        if limit is not None and length >= limit:
            by_engine = limit == self._engine_context
            what = f"{self._engine.name} holds {limit} (its max_model_len)" if by_engine else f"max_context is {limit}"
            raise ContextFullError(
                f"the conversation has {length} tokens and {what}: no room for another turn; shorten the prompt, end "
                "the rollout earlier (chat.budget.context, or catch BudgetError), or raise "
                + ("the engine's max_model_len" if by_engine else "rollout.max_context")
            )

    def _turn_sampling(self, overrides: Mapping[str, Any]) -> SamplingParams:
        if fixed := [k for k in overrides if k in _FIXED]:
            raise ValueError(
                f"chat.generate({fixed[0]}=...): {', '.join(_FIXED)} are the same for every turn, because the trainer "
                "computes the policy's log-probabilities under the run's values; set them under `sampling`"
            )
        if (longest := overrides.get("max_tokens", 1)) < 1:
            raise ValueError(f"chat.generate(max_tokens={longest}): must be >= 1")
        try:
            return dataclasses.replace(self._sampling, **overrides)
        except TypeError:
            unknown = [k for k in overrides if k not in SamplingParams.__dataclass_fields__]
            raise ValueError(f"chat.generate({unknown[0]}=...): unknown; a turn can set max_tokens and stop") from None

    def _render(self, conversation: list[dict[str, Any]]) -> tuple[str, list[int], bool]:
        """The whole conversation as text, the tokens to append, and whether they are a fresh context."""
        if self.turns == 0:
            text = self._template.render(conversation, self._tools)
            return text, self._template.encode(text), False
        # Only a turn the model ended itself has a closing token; a special token elsewhere is just a token.
        ended = self.finish_reason == "stop" and self.segments and self.segments[-1].end == len(self.token_ids)
        last = self.token_ids[-1] if ended else None
        try:
            text, new = self._template.continuation(self._prompt_text, self._turn_text, last, conversation, self._tools)
            return text, new, False
        except TemplateRewriteError:
            if self._template_rewrite == "refuse":
                raise
            text = self._template.render(conversation, self._tools)
            return text, self._template.encode(text), True

    def _append(self, conversation: list[dict[str, Any]], text: str, new: list[int], fresh: bool) -> None:
        """Take over what :meth:`_render` made."""
        self.messages += conversation[len(self.messages) :]
        self._prompt_text = text
        if fresh:
            self.starts.append(len(self.token_ids))
        self.token_ids += new
        self.loss_mask += [0] * len(new)
        self.logprobs += [0.0] * len(new)
        if self.turns == 0:
            self.prompt_length = len(self.token_ids)

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
        turn: Turn = self._template.read(self._prompt_text, generation.token_ids, self.completion, self._tools)
        self.messages.append(turn.message)
        self._turn_text, self.calls = turn.rendered, turn.calls
        return self.completion


def _as_message(message: Message | str) -> dict[str, Any]:
    message = {"role": "user", "content": message} if isinstance(message, str) else dict(message)
    if "role" not in message:
        raise ValueError(f"a message needs a role and a content, got {message!r}")
    return message


def turn_seed(seed: int, turn: int) -> int:
    """Sampling seed of one turn, in ``[0, 2**63)``: a hash of the attempt's seed and the turn's number."""
    digest = hashlib.blake2b(f"{seed}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
