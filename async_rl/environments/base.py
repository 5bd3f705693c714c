"""The Environment API: what a user writes to say what the tasks are and how an attempt is scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from async_rl.environments.chat import Chat


@dataclass(frozen=True, slots=True)
class Reward:
    """A score with named parts (the parts are logged, only ``value`` is trained on)."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


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
