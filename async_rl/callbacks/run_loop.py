"""RunLoop: the callback that ties Lightning's training loop to the control plane; always first in the list."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule
from typing_extensions import override

from async_rl.evaluation import evaluate_now
from async_rl.rng import rng_state, set_rng_state
from async_rl.types import Batch, EvalBatch

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer


class RunLoop(Callback):
    """Opens the session when training starts, closes the books of every step, evaluates at the end.

    It also keeps the state of the random generators in the checkpoints, which Lightning's do not hold.
    """

    def __init__(self) -> None:
        self._rng_state: dict[str, Any] = {}

    @override
    def setup(self, trainer: AsyncRLTrainer, pl_module: LightningModule, stage: str) -> None:  # type: ignore[override]
        trainer.start_engines()

    @override
    def on_train_start(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        trainer.open_session()
        if self._rng_state:  # only now, for loading models may draw from the generators
            set_rng_state(self._rng_state)

    @override
    def on_train_batch_start(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        for metric in trainer._results.values():  # type: ignore[union-attr]
            if not metric.meta.on_epoch:  # else Lightning goes on logging what this step may not have
                metric.reset()
        session = trainer.session
        session.overlap.step_started(time.monotonic(), session.busy_s())

    @override
    def on_before_optimizer_step(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        # A failure in the background must not be trained over: it ends the run before the next update.
        trainer.orchestrator.check()

    @override
    def on_train_batch_end(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        session = trainer.session
        session.overlap.step_ended(time.monotonic(), session.busy_s())
        step = pl_module.last_step
        if step.updated:
            trainer.orchestrator.batch_trained(batch)
        else:
            trainer.orchestrator.batch_dropped(batch, step.reason)
        pl_module.log_dict(session.drain_metrics())
        pl_module.log("step", float(trainer.global_step))  # loggers then count policy versions, not batches
        trainer.poll()

    @override
    def on_validation_batch_end(  # type: ignore[override]
        self,
        trainer: AsyncRLTrainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: EvalBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        figures = batch.summary()
        trainer.evaluations.append(figures)
        trainer.evaluated = trainer.evaluated.and_also(figures)
        trainer.session.ledger.note(trainer.evaluated.to_meta())
        pl_module.log("step", float(batch.version), batch_size=1)

    @override
    def on_train_end(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        due = trainer.evaluate_at == "ends" or trainer.makes_up
        if due and trainer.ends_well and trainer.global_step not in trainer.evaluated.finished:
            # What stops the run early, be it that the prompts are used up, is no reason to stop the evaluation.
            stopped, trainer.should_stop = trainer.should_stop, False
            evaluate_now(trainer)
            trainer.should_stop = trainer.should_stop or stopped
        trainer.shutdown.start()

    @override
    def on_exception(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        trainer.shutdown.start()

    @override
    def on_save_checkpoint(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["async_rl"] = trainer.orchestrator.state_dict() | {"rng": rng_state()}

    @override
    def on_load_checkpoint(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._rng_state = checkpoint.get("async_rl", {}).get("rng", {})
