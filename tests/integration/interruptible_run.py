"""A run that trains two steps and then waits for rollouts that never end; started as a process by the tests."""

import asyncio
import itertools
import sys
from pathlib import Path

from lightning.pytorch import Callback

from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments.arithmetic import Arithmetic
from async_rl.policy import PolicyModule
from async_rl.trainer import AsyncRLTrainer


class SlowToClose(ScriptedEngine):
    async def close(self):
        await asyncio.sleep(0 if sys.argv[3] == "quick" else 600)


class Tell(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2:
            print("waiting", flush=True)

    def on_train_end(self, trainer, policy):
        print("ending", flush=True)


def main() -> None:
    numbers = itertools.count()
    engine = SlowToClose(lambda prompt, seed: [11, 12], lambda prompt, seed: 0.0 if next(numbers) < 8 else 1e6)
    trainer = AsyncRLTrainer(
        max_steps=9, max_staleness=2, run_dir=Path(sys.argv[2]), evaluate_at="never", parity_check=False, logger=False,
        enable_progress_bar=False,
        accelerator="cpu", callbacks=[Tell()], shutdown_timeout_s=5.0,
    )  # fmt: skip
    data = RolloutDataModule(
        Arithmetic(), engine, batch_size=2, group_size=2, sampling=SamplingParams(max_tokens=4), rollout_threads=1
    )
    last_words = Path(sys.argv[2], "last_words")
    trainer.shutdown.before_exit.append(lambda reason, code: last_words.write_text(f"{code} {reason}"))
    trainer.fit(PolicyModule(sys.argv[1]), datamodule=data)
    sys.exit(trainer.end.exit_code)


if __name__ == "__main__":
    main()
