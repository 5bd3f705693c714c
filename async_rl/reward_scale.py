"""RewardScale: how a mean reward is shown, by what the rewards of the run are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_ROUNDING = 1e-9  # a sum of weights such as 0.7 + 0.2 + 0.1 may miss 1 by that


class RewardScale:
    """In per cent as long as every reward seen lies in [0, 1], else as a plain number.

    Args:
        low: Lowest reward seen; infinite where none was.
        high: Highest reward seen.
    """

    def __init__(self, low: float = math.inf, high: float = -math.inf) -> None:
        self.low, self.high = low, high

    def see(self, rewards: Iterable[float]) -> None:
        """Take in some rewards of the run."""
        for reward in rewards:
            self.low, self.high = min(self.low, reward), max(self.high, reward)

    def show(self, mean: float) -> str:
        """A mean reward for people: ``"46.9%"`` or ``"3.250"``; NaN is ``"nothing measured"``."""
        if math.isnan(mean):
            return "nothing measured"
        return f"{mean:.1%}" if self.low >= -_ROUNDING and self.high <= 1.0 + _ROUNDING else f"{mean:.3f}"


def shown_evaluation(figures: Mapping[str, Any], name: str) -> str:
    """An evaluation among the closing figures of a run, be they read from its ``run.json``.

    Args:
        figures: See :class:`~async_rl.callbacks.summary.RunSummary`.
        name: ``"eval_start"`` or ``"eval_end"``.
    """
    mean = figures[name]
    return RewardScale(figures["reward_min"], figures["reward_max"]).show(math.nan if mean is None else mean)
