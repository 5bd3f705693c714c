"""Runs that will not end by themselves, one process each, started by test_shutdown.py."""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from lightning.pytorch import Callback

from async_rl.checkpoint_io import DurableCheckpointIO
from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments.arithmetic import Arithmetic
from async_rl.environments.base import Environment
from async_rl.policy import PolicyModule
from async_rl.trainer import AsyncRLTrainer

TIMEOUT_S, LONG_TIMEOUT_S, SAVE_TIMEOUT_S = 8.0, 60.0, 3.0


STUCK = threading.Event()  # from here on rollouts don't end


class Stuck(Environment):
    """Answers until the second step is trained; then every rollout does what ``stuck`` says."""

    def __init__(self):
        self.numbers = itertools.count()

    def prompts(self, split):
        return Arithmetic().prompts(split)

    async def rollout(self, prompt, chat):
        await chat.generate([{"role": "user", "content": "2 + 2"}])
        if STUCK.is_set():
            await self.stuck()
        return float(next(self.numbers) % 2)


class BlocksTheLoop(Stuck):
    async def stuck(self):
        time.sleep(3600)


class SwallowsCancellation(Stuck):
    async def stuck(self):
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)


class BlocksAnExecutorThread(Stuck):
    async def stuck(self):
        await asyncio.to_thread(time.sleep, 3600)


class BlocksItsThread(Stuck):
    def rollout(self, prompt, chat):
        chat.generate([{"role": "user", "content": "2 + 2"}])
        if STUCK.is_set():
            time.sleep(3600)
        return float(next(self.numbers) % 2)


class HangsAtTheEnd(DurableCheckpointIO):
    """A disk that is gone when the last checkpoint is to be written."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if STUCK.is_set():
            time.sleep(3600)
        super().save_checkpoint(checkpoint, path, storage_options)


class Ends(Callback):
    """Sends SIGTERM to its own process once it waits for stuck rollouts; hangs at the end if told to."""

    def __init__(self, hang):
        self.hang = hang

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2:
            STUCK.set()
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def on_train_end(self, trainer, policy):
        print(time.monotonic(), flush=True)
        if self.hang == "in Python":
            time.sleep(3600)
        if self.hang == "in C":  # and keeps the interpreter lock
            re.match(r"(a+)+$", "a" * 64 + "b")


class NeverCloses(ScriptedEngine):
    async def close(self):
        await asyncio.sleep(3600)


CASES = {
    "environment blocks a thread": (BlocksItsThread, ScriptedEngine, ""),
    "environment blocks the event loop": (BlocksTheLoop, ScriptedEngine, ""),
    "environment swallows its cancellation": (SwallowsCancellation, ScriptedEngine, ""),
    "environment blocks an executor": (BlocksAnExecutorThread, ScriptedEngine, ""),
    "callback hangs": (BlocksItsThread, ScriptedEngine, "in Python"),
    "callback hangs with the interpreter lock": (BlocksItsThread, ScriptedEngine, "in C"),
    "save hangs": (BlocksItsThread, ScriptedEngine, "saving"),
    "engine does not close": (BlocksItsThread, NeverCloses, ""),
}


def run(case, model_dir, run_dir):
    environment, engine, hang = CASES[case]
    signal.alarm(90)  # a test that fails leaves nothing behind
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    trainer = AsyncRLTrainer(
        max_steps=9, max_staleness=2, run_dir=run_dir, evaluate_at="never", parity_check=False, logger=False,
        enable_progress_bar=False,
        accelerator="cpu", callbacks=[Ends(hang)], checkpoint_timeout_s=SAVE_TIMEOUT_S,
        shutdown_timeout_s=LONG_TIMEOUT_S if hang == "saving" else TIMEOUT_S,
    )  # fmt: skip
    if hang == "saving":
        trainer.strategy.checkpoint_io = HangsAtTheEnd()
    data = RolloutDataModule(
        environment(), engine(lambda prompt, seed: [11, 12]), batch_size=2, group_size=2, rollout_threads=1,
        sampling=SamplingParams(max_tokens=4),
    )  # fmt: skip
    trainer.fit(PolicyModule(model_dir), datamodule=data)
    sys.exit(trainer.end.exit_code)


def main():
    model_dir, directory = sys.argv[1:3]
    children = {}
    for case in CASES:
        place = Path(directory) / case.replace(" ", "_")
        place.mkdir()
        if (pid := os.fork()) == 0:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(place / name, os.O_CREAT | os.O_WRONLY, 0o644), number)
            run(case, model_dir, place / "run")
        children[pid] = case
    ends = {}
    while children:
        pid, status = os.wait()
        ends[children.pop(pid)] = (os.waitstatus_to_exitcode(status), time.monotonic())
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
