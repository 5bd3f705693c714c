"""ToolLatency: any environment behind a tool that takes its time, to see what asynchrony is worth."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from typing_extensions import override

from async_rl.environments.base import Environment, Reward
from async_rl.environments.chat import Chat


class ToolLatency(Environment):
    """Waits a log-normally distributed time, as for a slow tool, before each attempt of the wrapped environment.

    Args:
        environment: What to attempt; its ``rollout`` must be async (``SingleTurn`` is).
        mean_s: Mean wait in seconds, > 0.
        sigma: Shape of the tail, >= 0; 1 is heavy (the largest of 64 waits is about seven times the mean).
        seed: Seed of the waits.
    """

    def __init__(self, environment: Environment, mean_s: float, sigma: float = 1.0, seed: int = 0) -> None:
        if not mean_s > 0:
            raise ValueError(f"environment.mean_s={mean_s} must be > 0")
        if not sigma >= 0:
            raise ValueError(f"environment.sigma={sigma} must be >= 0")
        self.environment = environment
        self.name = environment.name
        self._mu = math.log(mean_s) - sigma**2 / 2
        self._sigma = sigma
        self._random = random.Random(seed)

    @override
    def prompts(self, split: Literal["train", "eval"]) -> Sequence[Mapping[str, Any]]:
        return self.environment.prompts(split)

    @override
    async def rollout(self, prompt: Mapping[str, Any], chat: Chat) -> float | Reward:
        await asyncio.sleep(self._random.lognormvariate(self._mu, self._sigma))
        return await self.environment.rollout(prompt, chat)  # type: ignore[misc]
