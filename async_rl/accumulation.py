"""Accumulation: what the forward and backward passes of one batch left behind so far, beside the gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from async_rl.algorithms.losses import importance_metrics


@dataclass(slots=True)
class Accumulation:
    """Sums over the groups of a batch that went through the model; nothing in it is divided by the batch's size yet.

    Attributes:
        groups: Ids of these groups.
        loss: Sum of their losses.
        suspects: Trajectories with a loss or log-probability that is not finite; nothing is added after them.
        ahead: How many trajectories were trained before their batch was complete.
        ahead_s: Seconds that took.
    """

    groups: set[int] = field(default_factory=set)
    loss: float = 0.0
    suspects: tuple[str, ...] = ()
    ahead: int = 0
    ahead_s: float = 0.0
    _logprobs: list[Tensor] = field(default_factory=list)
    _entropies: list[Tensor] = field(default_factory=list)
    _behaviour: list[Tensor] = field(default_factory=list)
    _ages: list[Tensor] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        """Whether the loss is a number so far."""
        return math.isfinite(self.loss)

    def add(self, loss: Tensor, logprobs: Tensor, entropy: Tensor, behaviour: Tensor, ages: Tensor) -> None:
        """Add a micro-batch: its loss, and of its tokens (``[tokens]`` each) what the metrics are made of."""
        self.loss += float(loss.detach())
        self._logprobs.append(logprobs.detach())
        self._entropies.append(entropy)
        self._behaviour.append(behaviour)
        self._ages.append(ages)

    def metrics(self, cap: float) -> dict[str, float]:
        """Importance ratios and entropy over all tokens that went through the model."""
        logprobs, behaviour, ages = (torch.cat(parts).cpu() for parts in (self._logprobs, self._behaviour, self._ages))
        return {
            **importance_metrics(logprobs, behaviour, ages, cap),
            "train/entropy": float(torch.cat(self._entropies).mean()),
        }
