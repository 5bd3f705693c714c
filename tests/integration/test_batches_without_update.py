"""A batch that makes no update, in a whole fit: dropped with its reason, and nothing else moves (CASES 23)."""

import itertools
import math
import sqlite3

import pytest
import torch
from fit_kit import Recorder, engine, make_data, make_policy, make_trainer, outcomes

from async_rl.algorithms.advantages import GRPO
from async_rl.algorithms.losses import DecoupledPPOLoss
from async_rl.callbacks.checkpoint import latest_checkpoint
from async_rl.engines.scripted import ScriptedEngine


def nan_for_the_second_batch(where):
    """What makes a policy's loss NaN once, by an advantage or by itself."""
    calls = itertools.count()

    class Advantage(GRPO):
        def __call__(self, rewards):
            advantages = super().__call__(rewards)
            return ((math.nan, *advantages[0][1:]), *advantages[1:]) if next(calls) == 1 else advantages

    class Loss(DecoupledPPOLoss):
        def __call__(self, *tokens):
            loss = super().__call__(*tokens)
            return loss * math.nan if next(calls) == 1 else loss

    return {"advantage": Advantage()} if where == "advantage" else {"loss": Loss()}


def dropped(run_dir):
    """Reason and version of the batches that made no update, and the reasons of their groups."""
    with sqlite3.connect(run_dir / "run.db") as db:
        batches = db.execute("select reason, version from batches where outcome = 'dropped'").fetchall()
        return batches, [r for (r,) in db.execute("select reason from groups where outcome = 'dropped'")]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("where", ["advantage", "loss"])
def test_a_loss_that_is_nan_once_costs_its_batch_and_nothing_else(tiny_model_dir, tmp_path, caplog, where, staleness):
    class Watch(Recorder):
        weights = ()
        in_the_system = 0.0

        def on_batch_planned(self, trainer, policy, batch):
            super().on_batch_planned(trainer, policy, batch)
            now, before = [p.detach().clone() for p in policy.parameters()], self.weights
            if self.values("batch_planned") == [0, 1, 1]:
                assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
            self.weights = now
            numbers = trainer.orchestrator.snapshot()
            self.in_the_system = max(self.in_the_system, numbers["running"] + numbers["kept"])

    watch, scripted = Watch(), engine()
    policy = make_policy(tiny_model_dir, lr_schedule="linear", **nan_for_the_second_batch(where))
    trainer = make_trainer(tmp_path, max_staleness=staleness, callbacks=[watch], stall_timeout_s=20)
    trainer.fit(policy, datamodule=make_data(with_engine=scripted, epochs=1))
    assert (trainer.end.exit_code, trainer.global_step) == (0, 4)
    assert watch.values("batch_planned") == [0, 1, 1, 2, 3]
    assert watch.values("policy_published") == [0, 1, 2, 3]  # version 1 once: nothing was pushed for the lost batch
    assert [load.version for load in scripted.loads] == sorted({load.version for load in scripted.loads})
    assert max(watch.ages) <= staleness
    assert watch.in_the_system <= (staleness + 1) * 2
    assert dropped(tmp_path) == ([("nonfinite", 1)], ["nonfinite"] * 2)
    assert outcomes(tmp_path) == {"trained": 8, "dropped": 2}  # its two places were given to two others
    assert "training version 1: loss nan" in caplog.text
    assert "no update, batch dropped (1 in a row). Samples: " in caplog.text
    state = torch.load(latest_checkpoint(tmp_path / "checkpoints"), weights_only=True)
    assert {int(s["step"]) for s in state["optimizer_states"][0]["state"].values()} == {4}
    assert state["lr_schedulers"][0]["last_epoch"] == 4
    assert all(torch.isfinite(p).all() for p in policy.parameters())


@pytest.mark.parametrize("staleness", [0, 2])
def test_batches_without_a_trainable_token_end_the_run_with_the_guard_s_code(tiny_model_dir, tmp_path, staleness):
    recorder, silent = Recorder(), ScriptedEngine(lambda prompt, seed: [])
    trainer = make_trainer(tmp_path, max_staleness=staleness, max_steps=50, callbacks=[recorder], stall_timeout_s=20)
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(with_engine=silent, epochs=1))
    assert (trainer.end.exit_code, trainer.global_step) == (3, 0)
    assert trainer.end.reason.startswith("3 empty batches in a row: ")
    assert "no trainable token" in trainer.end.reason
    assert recorder.values("batch_planned") == [0, 0, 0]
    assert recorder.values("policy_published") == [0]
    assert dropped(tmp_path) == ([("no_trainable_token", 0)] * 3, ["no_trainable_token"] * 6)
    assert set(outcomes(tmp_path)) <= {"dropped", "saved"}
