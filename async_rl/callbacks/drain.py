"""DrainCallback: at the end of training, wait for rollouts in flight and keep what finishes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import LightningModule
from typing_extensions import override

from async_rl.callbacks.base import RLCallback

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer


class DrainCallback(RLCallback):
    """Stops admission when training ends, gives running rollouts time to finish, records them in the ledger.

    A run that reaches ``max_steps`` drains nothing: the horizon never admits what no remaining step can train.

    Args:
        timeout_s: Seconds to wait for rollouts in flight, >= 0; half of the trainer's ``shutdown_timeout_s`` at most,
            for the rest of the end needs time too.
    """

    def __init__(self, timeout_s: float = 10.0) -> None:
        if timeout_s < 0:
            raise ValueError(f"DrainCallback: timeout_s={timeout_s} must be >= 0")
        self.timeout_s = timeout_s

    @override
    def on_train_end(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        trainer.orchestrator.stop_admission()
        trainer.call_rl_hook("on_drain_start")
        saved = trainer.orchestrator.drain(min(self.timeout_s, trainer.shutdown.remaining_s / 2), trainer.poll)
        trainer.call_rl_hook("on_drain_end", saved)
