"""ChatTemplate: messages to token ids through the tokenizer's chat template, only ever by appending."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from async_rl.environments.base import RolloutError, shorten
from async_rl.environments.tool_calls import MalformedCall, ToolCall, message_calls
from async_rl.environments.tool_format import ToolFormat

PLAIN_TEMPLATE = "{{ bos_token or '' }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template without any markup, for base models: ``tokenizer.chat_template = PLAIN_TEMPLATE``."""

Message = Mapping[str, Any]


class TemplateError(RolloutError):
    """The chat template is missing, fails, or has no tool-call format we can read."""

    reason = "template"


class TemplateRewriteError(TemplateError):
    """The chat template rewrites turns that were already sampled."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A sampled turn, read.

    Attributes:
        message: As an assistant message of the conversation.
        rendered: What the template should make of the message; compared with what it does.
        calls: The tool calls in it, in order.
    """

    message: dict[str, Any]
    rendered: str
    calls: tuple[ToolCall | MalformedCall, ...] = ()


class ChatTemplate:
    """Renders conversations and continuations of them, and reads turns. Safe to share between threads.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.

    Raises:
        TemplateError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.name = repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                f"the tokenizer {self.name} has no chat template, so there is no way to render messages; add a "
                "chat_template.jinja to the model directory (async_rl.environments.PLAIN_TEMPLATE joins the messages "
                "without markup)"
            )
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._reads_responses = getattr(tokenizer, "response_template", None) is not None
        # Fast tokenizers refuse concurrent use while one thread changes their state; rendering is short.
        self._lock = threading.Lock()

    # messages to tokens

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """The conversation as text, ending with what opens the next model turn.

        Args:
            messages: The conversation.
            tools: JSON schemas of the tools the model may call.

        Raises:
            TemplateError: the template can't render it, or its tool-call format is not known.
        """
        if tools:
            messages, tools = self._tool_format.fit(messages, tools)
        try:
            return self._apply(messages, tools)
        except Exception as error:
            raise TemplateError(
                f"the chat template of {self.name} cannot render this conversation ({type(error).__name__}: {error}): "
                f"{shorten(list(messages))}"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text (the template has put in every special token)."""
        with self._lock:
            token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
            return token_ids

    def continuation(
        self,
        prompt: str,
        turn: str,
        last_token: int | None,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
    ) -> tuple[str, list[int]]:
        """What follows a sampled turn: the rest of the template's closing, then the new messages.

        Nothing before is rendered again. The template's own idea of the whole conversation is only compared: it must
        begin with the prompt the turn answered and then the turn (white space in it may differ, many templates trim).
        A template that drops or moves anything there (Qwen3 and DeepSeek-R1 drop earlier thinking) would have the
        model trained on a conversation it never sees in use.

        Args:
            prompt: The rendered text that the turn answered.
            turn: The turn as it should be rendered, without its end token.
            last_token: The token with which the model ended the turn, ``None`` where it didn't.
            messages: The whole conversation, the turn and the new messages included.
            tools: JSON schemas of the tools.

        Returns:
            The rendered text of the whole conversation, and the token ids to append.

        Raises:
            TemplateRewriteError: the prefix does not hold.
            TemplateError: the template can't render it.
        """
        whole = self.render(messages, tools)
        if not whole.startswith(prompt):
            raise self._rewritten(prompt, whole)
        rest = whole[len(prompt) :]
        behind = end_of(turn, rest)
        if behind is None:
            raise self._rewritten(prompt + turn, whole)
        rest = rest[behind:]
        if last_token not in self._special:  # cut off, or ended by a stop string: the template closes the turn
            return whole, self.encode(rest)
        end = self._decode([cast("int", last_token)], skip_special_tokens=False)
        if rest.lstrip().startswith(end):  # the model has closed the turn itself
            rest = rest.lstrip()
            token_ids = self.encode(rest)
            # Encoded together with the end token, because some tokenizers treat the start of a text specially.
            return whole, token_ids[1:] if token_ids[:1] == [last_token] else self.encode(rest[len(end) :])
        if end in rest:  # something was put between the turn and its end
            raise self._rewritten(prompt + turn + end, whole)
        return whole, self.encode(rest)

    # tokens to messages

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a model turn, special tokens left out. For people and rewards; never encoded again."""
        return self._decode(token_ids, skip_special_tokens=True)

    def read(self, prompt: str, token_ids: Sequence[int], text: str, tools: Sequence[Message] = ()) -> Turn:
        """Make a message of a sampled turn.

        Args:
            prompt: The rendered text that the turn answers.
            token_ids: The turn.
            text: Its text, as the environment gets it.
            tools: JSON schemas of the tools the model was offered; without any, nothing is a call.
        """
        plain = {"role": "assistant", "content": text}
        if not self._reads_responses:
            return Turn(plain, text, tuple(self._tool_format.parse(text)) if tools else ())
        raw = self._decode(token_ids, skip_special_tokens=False)
        try:
            with self._lock:
                message = dict(self._tokenizer.parse_response(raw, prefix=prompt, tools=list(tools) or None))
        except Exception as error:  # the model wrote something its own format does not allow
            problem = MalformedCall(f"the turn can't be read ({type(error).__name__}: {shorten(str(error), 200)})")
            return Turn(plain, text, (problem,) if tools else ())
        if token_ids and token_ids[-1] in self._special:
            raw = raw.removesuffix(self._decode(token_ids[-1:], skip_special_tokens=False))
        message = {"role": "assistant", "content": "", **message}
        return Turn(message, raw, tuple(message_calls(message)) if tools else ())

    def write(self, call: ToolCall) -> str:
        """A turn that is nothing but this call, in the model's own format.

        Raises:
            TemplateError: the template's tool-call format is not known.
        """
        return self._tool_format.write(call)

    @functools.cached_property
    def _tool_format(self) -> ToolFormat:
        try:
            return ToolFormat.of(self._apply, self._reads_responses)
        except ValueError as error:
            raise TemplateError(f"the chat template of {self.name} {error}") from error

    def _apply(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        with self._lock:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
            return text

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        with self._lock:
            text: str = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
            return text

    def _rewritten(self, expected: str, got: str) -> TemplateRewriteError:
        same = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got))
        )
        return TemplateRewriteError(
            f"the chat template of {self.name} rewrites turns that were already sampled (for instance drops their "
            "thinking): training on the conversation as it was sampled would not be what is used later. After "
            f"{expected[max(0, same - 40) : same]!r} the conversation has {expected[same : same + 60]!r}, the template "
            f"renders {got[same : same + 60]!r}. Set rollout.template_rewrite=split to train each rewritten context as "
            "a sequence of its own, use a template that keeps earlier turns, or a single-turn environment"
        )


def end_of(turn: str, rest: str) -> int | None:
    """Where in ``rest`` the turn it begins with ends, white space aside; ``None`` where it begins otherwise."""
    if rest.startswith(turn):
        return len(turn)
    at = 0
    for character in turn:
        if character.isspace():
            continue
        while at < len(rest) and rest[at].isspace():
            at += 1
        if at == len(rest) or rest[at] != character:
            return None
        at += 1
    return at
