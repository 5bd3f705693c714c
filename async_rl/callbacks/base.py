"""RLCallback: a Lightning callback with hooks at the events of an asynchronous RL run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer
    from async_rl.types import Batch, Group


class RLCallback(Callback):
    """Base class of callbacks for :class:`~async_rl.trainer.AsyncRLTrainer`.

    Every hook runs on the main thread, between steps or while the trainer waits for a batch, never during a step.
    Ordinary Lightning hooks work as always, and a plain ``Callback`` that defines one of these methods gets it too.

    Example:
        >>> class PrintBest(RLCallback):
        ...     def on_rollout_end(self, trainer, policy, group):
        ...         best = max(group.trajectories, key=lambda t: t.reward)
        ...         print(best.reward, best.completion)
    """

    def on_rollout_end(self, trainer: AsyncRLTrainer, policy: LightningModule, group: Group) -> None:
        """Called for every finished group, before it is trained or after it was filtered."""

    def on_batch_planned(self, trainer: AsyncRLTrainer, policy: LightningModule, batch: Batch) -> None:
        """Called when the groups of the next step are fixed and recorded."""

    def on_policy_published(self, trainer: AsyncRLTrainer, policy: LightningModule, version: int) -> None:
        """Called when the weights of ``version`` were handed to the engines."""

    def on_policy_loaded(self, trainer: AsyncRLTrainer, policy: LightningModule, version: int) -> None:
        """Called when every open engine confirmed that it samples with ``version``."""

    def on_drain_start(self, trainer: AsyncRLTrainer, policy: LightningModule) -> None:
        """Called when admission has stopped and rollouts in flight are being waited for."""

    def on_drain_end(self, trainer: AsyncRLTrainer, policy: LightningModule, saved: int) -> None:
        """Called when draining is over; ``saved`` groups were kept in the ledger for a later run."""

    def on_empty_batch(self, trainer: AsyncRLTrainer, policy: LightningModule, report: Any) -> None:
        """Called when a batch's worth of groups ended with none kept, or a batch had nothing to train."""

    def on_version_recovered(self, trainer: AsyncRLTrainer, policy: LightningModule, version: int) -> None:
        """Called once after a resume, when the engines serve the restored ``version``."""
