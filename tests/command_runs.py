"""Runs the command several times at once, for test_exit_codes.py: imports once, then one forked process per run.

``python command_runs.py DIRECTORY < {"name": ["max_steps=2", ...], ...}``; each run has a working directory of its own
with its output in ``out`` and ``err``; prints the exit codes by name.
"""

import json
import os
import signal
import sys
from pathlib import Path

from lightning.pytorch import Callback

import async_rl.trainer  # noqa: F401 - imported once for all
from async_rl import main
from async_rl.environments.arithmetic import Arithmetic

COMMON = (
    "model=tiny", "engine=transformers", "batch_size=2", "group_size=2", "rollout.sampling.max_tokens=4",
    "run.evaluation.at=never", "hardware.trainer_threads=1", "engine.threads=1", "logger=jsonl",
)  # fmt: skip


class AlwaysRight(Arithmetic):
    def reward(self, prompt, completion):
        return 1.0


class BySample(Arithmetic):
    def reward(self, prompt, completion):
        return float(len(completion) % 2)


class NoPrompts(BySample):
    def prompts(self, split):
        return []


class NoneForPrompts(BySample):
    def prompts(self, split):
        return None


class BrokenReward(Arithmetic):
    def reward(self, prompt, completion):
        return {}["missing key of mine"]


class BrokenCallback(Callback):
    def on_train_batch_end(self, trainer, *args):
        raise ZeroDivisionError("a bug of mine")


class Terminates(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


class Stops(Callback):
    """Sends itself SIGINT, so many times, before the first batch."""

    def __init__(self, times=1):
        self.times = times

    def on_batch_planned(self, trainer, policy, batch):
        raise AssertionError("stopped before there was a batch")

    def on_train_start(self, trainer, policy):
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGINT)


def run(arguments):
    sys.argv = ["train.py", *COMMON, *arguments]
    sys.exit(main.main())


if __name__ == "__main__":
    children = {}
    for name, arguments in json.load(sys.stdin).items():
        place = Path(sys.argv[1], name)
        place.mkdir()
        if (pid := os.fork()) == 0:
            signal.alarm(100)  # a test that fails leaves nothing behind
            os.chdir(place)
            for number, file in ((1, "out"), (2, "err")):
                os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY, 0o644), number)
            run(arguments)
        children[pid] = name
    codes = {}
    while children:
        pid, status = os.wait()
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
    print(json.dumps(codes))
