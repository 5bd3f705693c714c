"""RunProgress: one line per step, and a live line that says what the run is doing and waiting for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from rich.console import Console
from rich.live import Live
from rich.text import Text
from typing_extensions import override

from async_rl.callbacks.base import RLCallback
from async_rl.reward_text import mean_reward
from async_rl.types import Batch, EvalBatch

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer


class RunProgress(RLCallback):
    """Prints a line per step; on a terminal, a live line below shows running, kept and what is being waited for.

    The seconds of a step go from the end of the one before to its own, evaluations between them left out: these have a
    line of their own. ``waited`` is the part of it in which there was no batch to train, ``time/wait_for_batch_s``.

    Args:
        every: Print every so many steps, >= 1.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"RunProgress: every={every} must be >= 1")
        self.every = every
        self.console = Console(highlight=False, soft_wrap=True)
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)
        self._step_began_s = time.monotonic()
        self._evaluation_began_s = 0.0

    @override
    def setup(self, trainer: AsyncRLTrainer, pl_module: LightningModule, stage: str) -> None:  # type: ignore[override]
        if trainer.replay is None and (trainer.makes_up or not trainer.nothing_to_train):
            self.console.print("starting the engine and loading the first weights ...")

    @override
    def on_train_start(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        self._step_began_s = time.monotonic()
        if self.console.is_terminal:
            self._live = Live(
                get_renderable=lambda: self._status(trainer), console=self.console, refresh_per_second=4, transient=True
            )
            self._live.start()

    @override
    def on_validation_start(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        self._evaluation_began_s = time.monotonic()

    @override
    def on_validation_end(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        self._step_began_s += time.monotonic() - self._evaluation_began_s

    @override
    def on_train_batch_end(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        now_s = time.monotonic()
        step_s, self._step_began_s = now_s - self._step_began_s, now_s
        step = pl_module.last_step
        waited_s = trainer.callback_metrics["time/wait_for_batch_s"]  # logged a moment ago, by RunLoop
        rewards = [t.reward for t in batch.trajectories]
        if not step.updated:
            self.console.print(f"[yellow]batch {batch_idx} not trained: {step.reason}[/yellow]")
        elif trainer.global_step % self.every == 0:
            ages = batch.ages() or [0]
            bound = "off" if batch.max_staleness is None else batch.max_staleness
            self.console.print(
                f"step {trainer.global_step:>4}/{trainer.max_steps}"
                f"  reward {sum(rewards) / len(rewards):.3f}"
                f"  age {sum(ages) / len(ages):.1f} max {max(ages)} of {bound}"
                f"{_generating(trainer, '  ')}"
                f"  {step_s:.1f} s (waited {waited_s:.1f} s)"
            )

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
        e = batch.summary()
        failed = f", {e['failures']:.0f} failed" if e["failures"] else ""
        what = f"{mean_reward(e['reward'])}[/bold]" + (" mean reward" if e["samples"] else "")
        if passes := [(name, share) for name, share in e.items() if name.startswith("pass@") and "/" not in name]:
            what += ", {} {:.1%}".format(*passes[-1])
        self.console.print(
            f"[bold]evaluation at version {batch.version}: {what}"
            f" ({e['samples']:.0f} samples of {e['prompts']:.0f} prompts{failed}, {batch.seconds:.1f} s)"
        )

    @override
    def teardown(self, trainer: AsyncRLTrainer, pl_module: LightningModule, stage: str) -> None:  # type: ignore[override]
        self._live.stop()

    @override
    def on_exception(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._live.stop()

    def _status(self, trainer: AsyncRLTrainer) -> Text:
        try:
            books = trainer.orchestrator.snapshot()
        except RuntimeError:
            return Text("closing ...")
        state = f"waiting for {books['waiting_for']}" if books["waiting_for"] else "training"
        if trainer.validating:
            state = "evaluating"
        step = min(trainer.global_step + 1, trainer.max_steps)
        return Text(
            f"step {step}/{trainer.max_steps}: {state}{_generating(trainer, ' | ')}"
            + f" | admission limited by {books['limited_by']}" * (trainer.replay is None),
            style="dim",
        )


def _generating(trainer: AsyncRLTrainer, separator: str) -> str:
    """What the rollout side does; empty in a replay, which has none."""
    if trainer.replay is not None:
        return ""
    books = trainer.orchestrator.snapshot()
    parts = f"running {books['running']:.0f} kept {books['kept']:.0f}", f"{trainer.session.tokens_per_s():.0f} tokens/s"
    return "".join(separator + part for part in parts)
