"""ChatTemplate: messages to token ids through the tokenizer's chat template, only ever by appending."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.environments.base import RolloutError, shorten

PLAIN_TEMPLATE = "{{ bos_token or '' }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template without any markup, for base models: ``tokenizer.chat_template = PLAIN_TEMPLATE``."""


class TemplateError(RolloutError):
    """The chat template is missing, fails, or rewrites turns that were already sampled."""

    reason = "template"


class ChatTemplate:
    """Renders conversations and continuations of them. Safe to share between threads.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.

    Raises:
        TemplateError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r} has no chat "
                "template, so there is no way to render messages; add a chat_template.jinja to the model directory "
                "(async_rl.environments.PLAIN_TEMPLATE joins the messages without markup)"
            )
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        # Fast tokenizers refuse concurrent use while one thread changes their state; rendering is short.
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as text, ending with what opens the next model turn."""
        try:
            with self._lock:
                text: str = self._tokenizer.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True
                )
                return text
        except Exception as error:
            raise TemplateError(
                f"the chat template cannot render this conversation ({type(error).__name__}: {error}): "
                f"{shorten(list(messages))}"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text (the template has put in every special token)."""
        with self._lock:
            token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
            return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a model turn, special tokens left out. For people and rewards; never encoded again."""
        with self._lock:
            text: str = self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            return text

    def continuation(
        self, prompt: str, turn: str, last_token: int | None, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[int]]:
        """What follows a sampled turn: the rest of the template's closing, then the new messages.

        Nothing before is rendered again. The template's own idea of the whole conversation is only compared: it must
        begin with the prompt the turn answered and then the turn (white space around it may differ, many templates
        trim). A template that drops or moves anything there (Qwen3 and DeepSeek-R1 drop earlier thinking) would have
        the model trained on a conversation it never sees in use.

        Args:
            prompt: The rendered text that the turn answered.
            turn: Text of the turn.
            last_token: Last token of the turn, ``None`` for an empty turn.
            messages: The whole conversation, the turn and the new messages included.

        Returns:
            The rendered text of the whole conversation, and the token ids to append.

        Raises:
            TemplateError: the prefix does not hold.
        """
        whole = self.render(messages)
        if not whole.startswith(prompt):
            raise self._rewritten(prompt, whole)
        rest = whole[len(prompt) :]
        if rest.startswith(turn):
            rest = rest[len(turn) :]
        elif rest.lstrip().startswith(turn.strip()):
            rest = rest.lstrip()[len(turn.strip()) :]
        else:
            raise self._rewritten(prompt + turn, whole)
        if last_token not in self._special:  # cut off, or ended by a stop string: the template closes the turn
            return whole, self.encode(rest)
        with self._lock:
            end = self._tokenizer.decode([last_token], skip_special_tokens=False)
        if rest.lstrip().startswith(end):  # the model has closed the turn itself
            rest = rest.lstrip()
            token_ids = self.encode(rest)
            # Encoded together with the end token, because some tokenizers treat the start of a text specially.
            return whole, token_ids[1:] if token_ids[:1] == [last_token] else self.encode(rest[len(end) :])
        if end in rest:  # something was put between the turn and its end
            raise self._rewritten(prompt + turn + end, whole)
        return whole, self.encode(rest)

    @staticmethod
    def _rewritten(expected: str, got: str) -> TemplateError:
        same = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got))
        )
        return TemplateError(
            "the chat template rewrites turns that were already sampled (for instance drops their thinking): training "
            f"on them would not be what is used later. After {expected[max(0, same - 40) : same]!r} the conversation "
            f"has {expected[same : same + 60]!r}, the template renders {got[same : same + 60]!r}. Use a template that "
            "keeps earlier turns, or a single-turn environment"
        )
