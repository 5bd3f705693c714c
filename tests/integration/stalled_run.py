"""A run that stalls after two steps, in its environment or in a callback; started as a process by the tests."""

import sys
import time
from pathlib import Path

from lightning.pytorch import Callback

from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments.arithmetic import Arithmetic
from async_rl.policy import PolicyModule
from async_rl.trainer import AsyncRLTrainer


def a_tool_that_hangs() -> None:
    time.sleep(600)


class Stubborn(Arithmetic):
    def reward(self, prompt, completion):
        if sys.argv[3] == "environment" and self.steps >= 2:
            a_tool_that_hangs()
        return float(len(completion))


class Steps(Callback):
    def on_train_batch_end(self, trainer, policy, *args):
        Stubborn.steps = trainer.global_step
        if trainer.global_step == 2:
            print("stalling", flush=True)
            if sys.argv[3] == "callback":
                a_tool_that_hangs()


def main() -> None:
    Stubborn.steps = 0
    engine = ScriptedEngine(lambda prompt, seed: [11, 12], 0.01)
    trainer = AsyncRLTrainer(
        max_steps=9, max_staleness=2, run_dir=Path(sys.argv[2]), evaluate_at="never", parity_check=False, logger=False,
        enable_progress_bar=False,
        accelerator="cpu", callbacks=[Steps()], stall_timeout_s=1.5, shutdown_timeout_s=3.0,
    )  # fmt: skip
    data = RolloutDataModule(
        Stubborn(), engine, batch_size=2, group_size=2, sampling=SamplingParams(max_tokens=4), rollout_timeout_s=600,
        reward_timeout_s=500,
    )  # fmt: skip
    trainer.fit(PolicyModule(sys.argv[1]), datamodule=data)


if __name__ == "__main__":
    main()
