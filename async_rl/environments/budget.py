"""ChatBudget: how much of its turns, tokens and context an attempt has left."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.environments.base import RolloutError


class BudgetError(RolloutError):
    """The attempt has used up its turns or tokens; an environment may catch it and score what there is."""

    reason = "budget"


class ContextFullError(BudgetError):
    """The conversation leaves no room for another token."""

    reason = "context"


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """What one attempt may use; ``None`` for no limit.

    Attributes:
        max_turns: Model turns, >= 1.
        max_generated_tokens: Sampled tokens of all turns together, >= 1.
        max_context: Tokens the model sees at once, those it samples included, >= 2.

    Raises:
        ValueError: a limit leaves nothing; the message names it.
    """

    max_turns: int | None = None
    max_generated_tokens: int | None = None
    max_context: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_turns", 1), ("max_generated_tokens", 1), ("max_context", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value!r} must be >= {least}, or None for no limit")


@dataclass(frozen=True, slots=True)
class ChatBudget:
    """What is left at one moment; ``None`` for no limit.

    Attributes:
        turns: Model turns left.
        tokens: Tokens left to sample, over all turns.
        context: Tokens that still fit into the model's context.
    """

    turns: int | None
    tokens: int | None
    context: int | None

    @property
    def exhausted(self) -> bool:
        """Whether the next ``generate`` is sure to raise :class:`BudgetError`."""
        return any(left is not None and left < 1 for left in (self.turns, self.tokens, self.context))

    def clip(self, max_tokens: int) -> int:
        """The longest turn there is budget for, at most ``max_tokens``."""
        return min(max_tokens, *(left for left in (self.tokens, self.context) if left is not None), max_tokens)
