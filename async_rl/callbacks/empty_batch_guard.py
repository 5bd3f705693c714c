"""EmptyBatchGuard: stops a run whose rollouts bring nothing to train, and says why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from typing_extensions import override

from async_rl.callbacks.base import RLCallback
from async_rl.run_end import EXIT_GUARD
from async_rl.types import Batch

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer

log = logging.getLogger(__name__)


class EmptyBatchGuard(RLCallback):
    """Ends the run with exit code 3 after a few empty batches in a row.

    An empty batch is ``batch_size`` groups that ended one after the other with none kept, or a planned batch without a
    trainable token. A kept group starts the count again: a run that rarely finds signal goes on, slowly. The closing
    message tells no signal (all rewards of every group equal) from an outage (groups failing, with the first error).

    Where every attempt fails, more than ``max_failures`` in a row (rollout.max_failures=16: the 17th) end the run with
    exit code 1 and the first error's traceback long before; the guard is what ends one where attempts succeed in
    between and still no group is completed.

    Groups of equal rewards count as empty where they are filtered (``filter_zero_variance``). Where they are trained,
    as many batches in a row without any advantage get a warning.

    Args:
        max_consecutive_empty: Empty batches in a row that end the run, >= 1.
    """

    def __init__(self, max_consecutive_empty: int = 3) -> None:
        if max_consecutive_empty < 1:
            raise ValueError(f"EmptyBatchGuard: max_consecutive_empty={max_consecutive_empty} must be >= 1")
        self.max_consecutive_empty = max_consecutive_empty
        self._without_advantage = 0

    @override
    def on_batch_planned(self, trainer: AsyncRLTrainer, policy: LightningModule, batch: Batch) -> None:
        self._without_advantage = 0 if any(map(any, batch.advantages)) else self._without_advantage + 1
        if self._without_advantage == self.max_consecutive_empty:
            rewards = sorted({t.reward for group in batch.groups for t in group.trajectories})
            log.warning(
                "%d batches in a row without an advantage: nothing is learned from them (rewards seen: %s). "
                "rollout.filter_zero_variance=true leaves groups of equal rewards out, and ends a run of nothing else",
                *(self._without_advantage, ", ".join(f"{reward:g}" for reward in rewards[:8])),
            )

    @override
    def on_empty_batch(self, trainer: AsyncRLTrainer, policy: LightningModule, report: Any) -> None:
        if report.in_a_row >= self.max_consecutive_empty:
            trainer.stop(f"{report.in_a_row} empty batches in a row: {report}", exit_code=EXIT_GUARD)
