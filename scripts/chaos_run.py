"""One life of a chaos run: a real AsyncRLTrainer.fit in a process of its own, on an environment that misbehaves."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import transformers.models.llama.modeling_llama  # noqa: F401 - what the fork server loads once for all lives
from chaos_check import MARKER

from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import Engine, SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments.arithmetic import Arithmetic
from async_rl.jsonl_logger import JsonlLogger
from async_rl.policy import PolicyModule
from async_rl.trainer import AsyncRLTrainer

if TYPE_CHECKING:
    from chaos_life import LifeSpec

HEART = "import sys; sys.stdin.read()"
"""What the process of the scripted engine runs: it lives until it is killed or its parent is gone."""
REWARD_TIMEOUT_S = 2.0


def share(*values: object) -> float:
    """A number in [0, 1) that is a function of ``values``."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=8).digest(), "big") / 2**64


class MortalEngine(ScriptedEngine):
    """A scripted engine with a process that can be killed, whose death is the engine's."""

    def __init__(self) -> None:
        super().__init__(output, latency_s, load_s=0.01, name="mortal-0")
        self._heart: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the process, and a thread that waits for its end."""
        await super().start()
        heart = self._heart = subprocess.Popen([sys.executable, "-S", "-c", HEART], stdin=subprocess.PIPE)

        def watch() -> None:
            heart.wait()
            if self._heart is heart:
                self.die()

        threading.Thread(target=watch, name="heart-watch", daemon=True).start()

    async def close(self) -> None:
        """End the process."""
        heart, self._heart = self._heart, None
        if heart is not None:
            heart.kill()
            heart.wait()
        await super().close()


def output(prompt: tuple[int, ...], seed: int) -> list[int]:
    """What the engine says: 2 to 8 tokens, a function of the seed."""
    return [10 + int(50 * share(seed, i)) for i in range(2 + int(7 * share(seed)))]


def latency_s(prompt: tuple[int, ...], seed: int) -> float:
    """How long it takes: 10 to 60 ms, for one in 20 half a second more."""
    return 0.01 + 0.05 * share(seed, "latency") + 0.5 * (share(seed, "straggler") < 0.05)


class FaultyArithmetic(Arithmetic):
    """Sums whose reward raises, hangs or is NaN for some completions; a retry, which samples another one, succeeds.

    Whether it does is a function of prompt and completion: a run has the same faults however often it dies.
    """

    def __init__(self, report: Callable[..., None]) -> None:
        super().__init__()
        self._report = report

    def reward(self, prompt: Any, completion: str) -> float:
        """Depends on the completion only."""
        drawn = share(sorted(prompt.items()), completion)
        if drawn < 0.05:
            self._report("environment", "environment raises")
            raise OSError("the sandbox of this sample went away")
        if drawn < 0.09:
            self._report("environment", "environment hangs")
            time.sleep(3600)
        if drawn < 0.14:
            self._report("environment", "environment returns NaN")
            return float("nan")
        return share(completion, "reward")


class Reporter(pl.Callback):
    """Tells the parent how far the run is, and the loss of each step to the last bit."""

    def __init__(self, report: Callable[..., None]) -> None:
        self._report = report

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The engine serves the first weights."""
        self._report("started", trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A step is done."""
        if pl_module.last_step.updated:
            self._report("step", trainer.global_step, pl_module.last_step.metrics["train/loss"].hex())


def make_engine(spec: LifeSpec) -> Engine:
    if spec.engine == "scripted":
        return MortalEngine()
    from async_rl.engines.vllm import VLLMEngine

    return VLLMEngine(spec.model, dtype="float32", max_model_len=256, max_num_seqs=16, kv_cache_gib=0.25)


def live(spec: LifeSpec, to_parent: Connection) -> None:
    """Run until the end or the death of this process; exits with the run's exit code."""
    os.environ[MARKER] = spec.name
    os.environ["TMPDIR"] = spec.temp_dir
    tempfile.tempdir = None
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    lock = threading.Lock()

    def report(*message: object) -> None:
        with lock:
            to_parent.send(message)

    torch.set_num_threads(1)
    pl.seed_everything(spec.seed, verbose=False)
    trainer = AsyncRLTrainer(
        max_steps=spec.max_steps,
        enable_progress_bar=False,
        max_staleness=spec.max_staleness,
        seed=spec.seed,
        run_dir=spec.run_dir,
        resume=spec.resume,
        checkpoint_every=2,
        evaluate_at="never",
        parity_check=spec.engine == "vllm",
        accelerator="cpu",
        callbacks=[Reporter(report)],
        logger=JsonlLogger(Path(spec.run_dir) / "metrics.jsonl"),
    )
    data = RolloutDataModule(
        FaultyArithmetic(report),
        make_engine(spec),
        batch_size=2,
        group_size=2,
        sampling=SamplingParams(max_tokens=8),
        max_retries=6,
        reward_timeout_s=REWARD_TIMEOUT_S,
    )
    policy = PolicyModule(spec.model, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), lr_schedule="linear")
    trainer.fit(policy, datamodule=data)
    report("end", trainer.end.reason)
    sys.exit(trainer.end.exit_code)
