"""Learning rate schedules over policy versions: warm-up, then constant, linear or cosine; no step has rate zero."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def lr_factor(version: int, schedule: Schedule, warmup_steps: int, max_steps: int) -> float:
    """Share of the peak learning rate used for the step that makes ``version`` into ``version + 1``.

    Args:
        version: Policy version being trained, >= 0.
        schedule: ``"constant"``, ``"linear"`` or ``"cosine"``, the latter two towards 0 after the last step.
        warmup_steps: Steps over which the rate rises linearly, the last of them at the peak.
        max_steps: Steps of the whole run.

    Returns:
        In (0, 1] for every version below ``max_steps``.
    """
    if version < warmup_steps:
        return (version + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min((version - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    return 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


def make_schedule(optimizer: Optimizer, schedule: Schedule, warmup_steps: int, max_steps: int) -> LambdaLR:
    """:func:`lr_factor` as a scheduler, stepped once per policy version."""
    return LambdaLR(optimizer, lambda version: lr_factor(version, schedule, warmup_steps, max_steps))
