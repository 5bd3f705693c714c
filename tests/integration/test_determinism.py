"""S = 0 with a deterministic engine: the same seed gives the same losses, bit for bit."""

import torch

from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import SamplingParams
from async_rl.engines.transformers import TransformersEngine
from async_rl.environments.arithmetic import Arithmetic
from async_rl.policy import PolicyModule
from async_rl.trainer import AsyncRLTrainer


class OddLength(Arithmetic):
    """A reward that a random model gets sometimes."""

    def reward(self, prompt, completion):
        return float(len(completion) % 2)


def losses(model_dir, run_dir, seed):
    torch.manual_seed(0)
    seen = []
    policy = PolicyModule(model_dir, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    data = RolloutDataModule(
        OddLength(),
        TransformersEngine(str(model_dir), deterministic=True, dtype="float32", threads=1),
        batch_size=2,
        group_size=4,
        sampling=SamplingParams(max_tokens=6),
    )
    trainer = AsyncRLTrainer(
        max_steps=3, max_staleness=0, seed=seed, run_dir=run_dir, evaluate_at="never", logger=False, accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
    )  # fmt: skip
    original = policy.training_step

    def training_step(batch, batch_idx):
        original(batch, batch_idx)
        seen.append((policy.last_step.metrics["train/loss"], policy.last_step.metrics["train/grad_norm"]))

    policy.training_step = training_step
    trainer.fit(policy, datamodule=data)
    return seen


def test_two_runs_with_one_seed_give_the_same_losses(tiny_model_dir, tmp_path):
    first = losses(tiny_model_dir, tmp_path / "a", seed=3)
    assert len(first) == 3
    assert any(norm > 0 for _, norm in first)
    assert losses(tiny_model_dir, tmp_path / "b", seed=3) == first
    assert losses(tiny_model_dir, tmp_path / "c", seed=4) != first
