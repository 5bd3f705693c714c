"""A whole run on a tiny model and a scripted engine: what the integration tests share."""

import sqlite3
import threading

import torch

from async_rl.callbacks import RLCallback
from async_rl.datamodule import RolloutDataModule
from async_rl.engines.base import SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments.arithmetic import Arithmetic
from async_rl.policy import PolicyModule
from async_rl.trainer import AsyncRLTrainer


class RewardBySeed(Arithmetic):
    """Rewards that differ within a group, whatever was sampled."""

    def reward(self, prompt, completion):
        return float(len(completion) % 2)


def output(prompt, seed):
    return [10 + seed % 7] * (2 + seed % 3)


def engine(**kwargs):
    return ScriptedEngine(output, latency_s=kwargs.pop("latency_s", 0.002), **kwargs)


def make_policy(model_dir, **kwargs):
    kwargs.setdefault("optimizer", lambda p: torch.optim.AdamW(p, lr=1e-3))
    return PolicyModule(model_dir, **kwargs)


def make_trainer(run_dir, **kwargs):
    kwargs = {
        "max_steps": 4,
        "max_staleness": 2,
        "evaluate_at": "never",
        "parity_check": False,
        "logger": False,
        "enable_progress_bar": False,
    } | kwargs
    return AsyncRLTrainer(run_dir=run_dir, accelerator="cpu", **kwargs)


def make_data(environment=None, with_engine=None, **kwargs):
    kwargs = {"batch_size": 2, "group_size": 2, "sampling": SamplingParams(max_tokens=8)} | kwargs
    return RolloutDataModule(environment or RewardBySeed(), with_engine or engine(), **kwargs)


def outcomes(run_dir):
    with sqlite3.connect(run_dir / "run.db") as db:
        return dict(db.execute("select coalesce(outcome, 'open'), count(*) from groups group by 1"))


class Recorder(RLCallback):
    """Writes down which hook was called with what, and on which thread."""

    def __init__(self):
        self.calls = []
        self.ages = []

    def _note(self, name, value):
        assert threading.current_thread() is threading.main_thread()
        self.calls.append((name, value))

    def on_rollout_end(self, trainer, policy, group):
        self._note("rollout_end", group.id)

    def on_batch_planned(self, trainer, policy, batch):
        self._note("batch_planned", batch.version)
        self.ages += batch.ages()

    def on_policy_published(self, trainer, policy, version):
        self._note("policy_published", version)

    def on_policy_loaded(self, trainer, policy, version):
        self._note("policy_loaded", version)

    def on_drain_start(self, trainer, policy):
        self._note("drain_start", None)

    def on_drain_end(self, trainer, policy, saved):
        self._note("drain_end", saved)

    def on_version_recovered(self, trainer, policy, version):
        self._note("version_recovered", version)

    def values(self, name):
        return [value for n, value in self.calls if n == name]
