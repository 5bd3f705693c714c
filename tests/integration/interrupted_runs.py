"""Runs that get signals at different moments, one forked process each, started by test_interrupt.py.

``python interrupted_runs.py MODEL DIRECTORY`` prints, by case, the exit code, when the signals were sent and when it
ended (seconds of the monotonic clock, which all processes share), and what a second process was told that wanted to go
on with one of the runs.
"""

import asyncio
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

from lightning.pytorch import Callback

from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments.base import Environment
from async_rl.policy import PolicyModule
from async_rl.trainer import AsyncRLTrainer
from async_rl.types import SettingError

NEVER_S = 1e6


class Paced(Environment):
    """Rewards that differ within a group; from a policy version on, rollouts or evaluations take their time.

    Args:
        slow: The split that does, ``"train"`` or ``"eval"``.
        seconds: How long.
        place: Gets the file ``waiting`` when the first slow one begins.
    """

    name = "paced"

    def __init__(self, slow="", seconds=0.0, place=Path()):
        self.slow, self.seconds, self.place = slow, seconds, place
        self.is_slow = False
        self.numbers = itertools.count()

    def prompts(self, split):
        return [{"n": n, "split": split} for n in range(100 if split == "train" else 2)]

    async def rollout(self, prompt, chat):
        if self.is_slow and prompt["split"] == self.slow:
            (self.place / "waiting").touch()
            await asyncio.sleep(self.seconds)
        await chat.generate([{"role": "user", "content": f"{prompt['n']} + 2"}])
        return float(next(self.numbers) % 2)


class SlowsDown(Callback):
    """Makes the environment slow at a version, and notes when training ends."""

    def __init__(self, environment, version, place):
        self.environment, self.version, self.place = environment, version, place
        environment.is_slow = version == 0

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.version:
            self.environment.is_slow = True

    def on_train_end(self, trainer, policy):
        note(self.place / "ending")


def note(file):
    """Write the time into a file that is not there yet."""
    if not file.exists():
        file.with_suffix(".part").write_text(str(time.monotonic()))
        file.with_suffix(".part").rename(file)


class SlowToClose(ScriptedEngine):
    async def close(self):
        await asyncio.sleep(600)


@dataclass(frozen=True)
class Case:
    """A run, and the signals it gets: the first once something slow has begun, the second one when training ends."""

    signals: tuple[signal.Signals, ...]
    slow: str = "train"
    seconds: float = NEVER_S
    version: int = 2
    engine: type[ScriptedEngine] = ScriptedEngine
    trainer: Mapping[str, Any] = field(default_factory=dict)


FIRST = {"slow": "eval", "version": 0, "trainer": {"evaluate_at": "ends"}}
BETWEEN = {"slow": "eval", "trainer": {"eval_every": 2}}
LAST = {"slow": "eval", "trainer": {"evaluate_at": "ends", "max_steps": 2}}
CASES = {
    "waiting, SIGINT": Case((SIGINT,)),
    "waiting, SIGTERM": Case((SIGTERM,)),
    "waiting, SIGINT twice": Case((SIGINT, SIGINT), engine=SlowToClose, trainer={"shutdown_timeout_s": 600.0}),
    "engine does not close": Case((SIGTERM,), engine=SlowToClose),
    "first evaluation, SIGINT": Case((SIGINT,), **FIRST),
    "first evaluation, SIGTERM": Case((SIGTERM,), **FIRST),
    "evaluation between steps, SIGINT": Case((SIGINT,), **BETWEEN),
    "evaluation between steps, SIGTERM": Case((SIGTERM,), **BETWEEN),
    "last evaluation, SIGINT": Case((SIGINT,), **LAST),
    "last evaluation, SIGTERM": Case((SIGTERM,), **LAST),
    "rollouts in flight": Case((SIGTERM,), seconds=0.5),
}
SHARED = "waiting, SIGTERM"  # this one a second process wants to go on with, while it goes on


def make_run(run_dir, environment, engine=ScriptedEngine, **trainer):
    """Trainer and data of a run, with the same settings in every process that goes on with it."""
    settings = {"max_steps": 9, "evaluate_at": "never", "shutdown_timeout_s": 5.0} | trainer
    data = RolloutDataModule(
        environment, engine(lambda prompt, seed: [11, 12]), batch_size=2, group_size=2, rollout_threads=1,
        sampling=SamplingParams(max_tokens=4),
    )  # fmt: skip
    trainer = AsyncRLTrainer(
        max_staleness=2, run_dir=run_dir, parity_check=False, logger=False, enable_progress_bar=False,
        accelerator="cpu", **settings,
    )  # fmt: skip
    return trainer, data


def run(case, model_dir, place):
    signal.alarm(90)  # a test that fails leaves nothing behind
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(message)s")
    environment = Paced(case.slow, case.seconds, place)
    callbacks = [SlowsDown(environment, case.version, place)]
    trainer, data = make_run(place / "run", environment, case.engine, callbacks=callbacks, **case.trainer)
    try:
        trainer.fit(PolicyModule(model_dir), datamodule=data)
    except SystemExit as stopped:  # a script that is interrupted ends: what follows `fit` is not carried out
        note(place / "ending")  # where training has not begun, nothing of it ends
        os._exit(stopped.code)  # how the interpreter gets out of it is test_shutdown.py's business
    os._exit(99)


def told(run_dir, policy):
    """What somebody is told who wants to go on with a run that is going on."""
    trainer, data = make_run(run_dir, Paced(), resume=True)
    try:
        trainer.fit(policy, datamodule=data)
    except SettingError as error:
        return str(error)
    return "nothing"


def main():
    model_dir, directory = sys.argv[1:3]
    places = {case: Path(directory, case.replace(" ", "_")) for case in CASES}
    children, pids, ends, sent = {}, {}, {}, {case: [] for case in CASES}
    for case, place in places.items():
        place.mkdir()
        if (pid := os.fork()) == 0:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(place / name, os.O_CREAT | os.O_WRONLY, 0o644), number)
            run(CASES[case], model_dir, place)
        children[case] = pids[case] = pid
    second = ""
    while children:
        time.sleep(0.01)
        for case, pid in list(children.items()):
            signals, number = CASES[case].signals, len(sent[case])
            if number < len(signals) and (places[case] / ("waiting", "ending")[number]).exists():
                if case == SHARED:
                    if not all(times for other, times in sent.items() if other != SHARED):
                        continue  # this takes a while, and nobody should have to wait for it
                    second = told(places[case] / "run", PolicyModule(model_dir))
                sent[case].append(time.monotonic())
                os.kill(pid, signals[number])
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[case] = os.waitstatus_to_exitcode(status), sent[case], time.monotonic()
                del children[case]
    print(json.dumps({"ends": ends, "pid": pids[SHARED], "told": second}))


if __name__ == "__main__":
    main()
