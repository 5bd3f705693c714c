"""A run whose losses repeat bit for bit (S = 0, deterministic engine); started as a process, killed and resumed."""

import os
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback
from test_determinism import OddLength

from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import SamplingParams
from async_rl.engines.transformers import TransformersEngine
from async_rl.jsonl_logger import JsonlLogger
from async_rl.policy import PolicyModule
from async_rl.trainer import AsyncRLTrainer


class Uneven(OddLength):
    """One group in seven fails for good, others end with equal rewards; which ones depends on the prompt alone."""

    def reward(self, prompt, completion):
        if (prompt["a"] + 3 * prompt["b"]) % 7 == 3:
            raise ValueError("the judge has no answer to this one")
        return super().reward(prompt, completion)


class Kill(Callback):
    """SIGKILLs this process: in the middle of the step that follows a version, or between two steps."""

    def __init__(self, version: int, where: str) -> None:
        self.version = version
        self.where = where

    def on_before_optimizer_step(self, trainer, policy, optimizer):
        if (trainer.global_step, self.where) == (self.version, "step"):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_rollout_end(self, trainer, policy, group):
        if (trainer.global_step, self.where) == (self.version, "rollouts"):
            os.kill(os.getpid(), signal.SIGKILL)


def run(model_dir, run_dir, *, callbacks=(), resume=False):
    """Train up to version 6, with a checkpoint every two; the losses are in ``metrics.jsonl``."""
    pl.seed_everything(5, verbose=False)
    trainer = AsyncRLTrainer(
        max_steps=6, max_staleness=0, seed=3, run_dir=run_dir, resume=resume, evaluate_at="never",
        enable_progress_bar=False,
        logger=JsonlLogger(Path(run_dir) / "metrics.jsonl"), accelerator="cpu", checkpoint_every=2,
        callbacks=list(callbacks),
    )  # fmt: skip
    policy = PolicyModule(
        model_dir, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), lr_schedule="cosine", warmup_steps=2
    )
    data = RolloutDataModule(
        Uneven(),
        TransformersEngine(str(model_dir), deterministic=True, dtype="float32", threads=1),
        batch_size=2,
        group_size=4,
        sampling=SamplingParams(max_tokens=6),
        max_retries=0,
        filter_zero_variance=True,
    )
    trainer.fit(policy, datamodule=data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(sys.argv[1], sys.argv[2], callbacks=[Kill(int(sys.argv[3]), sys.argv[4])])
