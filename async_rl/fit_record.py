"""recorded: keeps run.json while a trainer fits, also for a run that was started from Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from async_rl.callbacks.summary import RunSummary
from async_rl.datamodule import RolloutDataModule
from async_rl.run_record import RunRecord

if TYPE_CHECKING:
    from async_rl.policy import PolicyModule
    from async_rl.replay import ReplayDataModule
    from async_rl.trainer import AsyncRLTrainer

RECIPE = "none (Python)"
"""What stands for the recipe in the run.json of a run that no command line started."""


@contextmanager
def recorded(
    trainer: AsyncRLTrainer, policy: PolicyModule, data: RolloutDataModule | ReplayDataModule
) -> Iterator[None]:
    """Write down what is taken, then, whatever ends the fit, what came of it.

    Args:
        trainer: With its own record, or without one: then a new one is made, and what it takes is written down.
        policy: What it is going to train.
        data: What on.
    """
    record = trainer.record
    if record is None:
        record = RunRecord(trainer.run_dir, RECIPE, trainer.seed, {}, sys.argv)
        record.start(_facts(trainer, policy, data))

    trainer.shutdown.before_exit.append(record.finish)
    try:
        yield
    finally:
        trainer.shutdown.before_exit.remove(record.finish)
        summaries = [c for c in trainer.callbacks if isinstance(c, RunSummary)]  # type: ignore[attr-defined]
        record.add_results(trainer.evaluations, summaries[0].figures if summaries else {})
        record.finish(trainer.end.reason, trainer.end.exit_code)


def _facts(trainer: AsyncRLTrainer, policy: PolicyModule, data: RolloutDataModule | ReplayDataModule) -> dict[str, str]:
    if isinstance(data, RolloutDataModule):
        environments = data.environments.values()
        engines = [f"{engine.name} ({type(engine).__name__}, {engine.dtype})" for engine in data.engines]
        sources = {
            "data": "; ".join(getattr(e, "source", "") or type(e).__name__ for e in environments),
            "engine": ", ".join(engines),
        }
    else:
        sources = {"data": f"recorded in {trainer.replay}"}
    return {
        "model": getattr(policy.model, "name_or_path", "") or type(policy.model).__name__,
        **sources,
        "device": f"{policy.device.type}, {os.cpu_count()} cores, {trainer.precision}",
        "steps": f"{trainer.max_steps}, max_staleness {trainer.staleness.max_staleness}",
        "results": str(trainer.run_dir),
    }
