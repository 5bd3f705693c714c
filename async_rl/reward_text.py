"""How a mean reward is shown: always as a number, for whether it is a share nobody knows before the run is over."""

from __future__ import annotations

import math


def mean_reward(mean: float | None) -> str:
    """A mean reward for people: ``"0.469"``; ``"nothing measured"`` for NaN, which is ``None`` in ``run.json``."""
    return "nothing measured" if mean is None or math.isnan(mean) else f"{mean:.3f}"
