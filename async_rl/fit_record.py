"""recorded: holds the run directory and keeps run.json while a trainer fits, also where Python started the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from async_rl.callbacks.summary import RunSummary
from async_rl.datamodule import RolloutDataModule
from async_rl.run_lock import RunLock
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
    """Hold the run directory, write down what is taken, then, whatever ends the fit, what came of it.

    Args:
        trainer: With its own record, whose owner holds the directory, or without one: then both are made here, and what
            the trainer takes is written down.
        policy: What it is going to train.
        data: What on.

    Raises:
        SettingError: another process, or another fit, is using the run directory.
    """
    record = trainer.record
    with nullcontext() if record is not None else RunLock(trainer.run_dir):
        if record is None:
            record = RunRecord(trainer.run_dir, RECIPE, trainer.seed, {}, sys.argv)
            record.start(_facts(trainer, policy, data))

        trainer.shutdown.before_exit.append(record.finish)
        try:
            yield
        finally:
            trainer.shutdown.before_exit.remove(record.finish)
            if trainer.nothing_to_train:
                version, evaluated = trainer.start_version, trainer.evaluated
                record.keep_results(version, evaluated.finished.get(version, {}), evaluated.told("eval_end", version))
            else:
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
        bound = f"max_staleness {trainer.staleness.max_staleness}"
        steps = f"{trainer.max_steps} of {data.batch_size} x {data.group_size} rollouts, {bound}"
    else:
        sources = {"data": f"recorded in {trainer.replay}"}
        steps = data.run.described(trainer.max_steps)
    return {
        "model": getattr(policy.model, "name_or_path", "") or type(policy.model).__name__,
        **sources,
        "device": f"{policy.device.type}, {os.cpu_count()} cores, {trainer.precision}",
        "steps": steps,
        "results": str(trainer.run_dir),
    }
