"""What a resume gives back and what it refuses: changed data, another bound, random generators, code in checkpoints."""

import random
import shutil
import sqlite3
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from fit_kit import Recorder, make_data, make_policy, make_trainer, outcomes

from async_rl.callbacks import RLCallback
from async_rl.callbacks.checkpoint import latest_checkpoint
from async_rl.checkpoint_io import CheckpointError
from async_rl.engines.transformers import TransformersEngine
from async_rl.environments.arithmetic import Arithmetic
from async_rl.orchestrator.ledger import Ledger
from async_rl.types import SettingError


class Odd(Arithmetic):
    """Rewards that differ within a group; ``rows`` may leave some out."""

    rows = slice(None)

    def prompts(self, split):
        return list(super().prompts(split))[self.rows]

    def reward(self, prompt, completion):
        return float(len(completion) % 2)


class Dies(RLCallback):
    """Ends the run with an error at a version: nothing is drained, no checkpoint is saved."""

    def __init__(self, at):
        self.at = at

    def on_batch_planned(self, trainer, policy, batch):
        if batch.version == self.at:
            raise KeyError("died")


@pytest.fixture(scope="module")
def made(tiny_model_dir, tmp_path_factory):
    """A run of S = 3 with two checkpoints (2 and 4) that died while version 5 waited to be trained."""
    run_dir = tmp_path_factory.mktemp("made")
    trainer = make_trainer(
        run_dir, max_steps=50, max_staleness=3, admit_ahead=3, checkpoint_every=2, callbacks=[Dies(5)]
    )
    with pytest.raises(KeyError, match="died"):
        trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(Odd(), batch_size=4))
    assert latest_checkpoint(run_dir / "checkpoints").name == "version-000004.ckpt"
    return run_dir


@pytest.fixture
def run_dir(made, tmp_path):
    """The directory of that run, a copy of its own."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def resume(model_dir, run_dir, data=None, **kwargs):
    data = data or make_data(Odd(), batch_size=4)
    trainer = make_trainer(run_dir, resume=True, **{"max_steps": 12, "max_staleness": 3} | kwargs)
    trainer.fit(make_policy(model_dir), datamodule=data)
    return trainer


def test_data_that_changed_on_the_disk_is_refused_before_an_engine_starts(tiny_model_dir, run_dir):

    class NoStart:
        async def start(self):
            raise AssertionError("started")

    fewer = Odd()
    fewer.rows = slice(1, None)
    for change, data in (
        (
            "environment: was {'arithmetic': '81 prompts, sha256 .*now {'arithmetic': '80 prompts",
            make_data(fewer, batch_size=4),
        ),
        ("batch_size: was 4, now 3", make_data(Odd(), batch_size=3)),
        ("rollout.shuffle: was True, now False", make_data(Odd(), batch_size=4, shuffle=False)),
    ):
        data.engines[0].start = NoStart().start
        with pytest.raises(SettingError, match=change):
            resume(tiny_model_dir, run_dir, data)
    with pytest.raises(SettingError, match=r"seed: was 0, now 1\n.*resume_allow=\[seed\]"):
        resume(tiny_model_dir, run_dir, seed=1)
    trainer = resume(tiny_model_dir, run_dir)  # and nothing was lost
    assert (trainer.global_step, outcomes(run_dir)) == (12, {"trained": 48})


def test_resume_allow_accepts_a_change_once_and_for_all(tiny_model_dir, run_dir, caplog):
    caplog.set_level("INFO", logger="async_rl")
    resume(tiny_model_dir, run_dir, make_data(Odd(), batch_size=2), resume_allow=["batch_size"])
    assert "2 recorded batches keep their batch_size of 4; batch_size=2 holds for the batches after them" in caplog.text
    assert resume(tiny_model_dir, run_dir, make_data(Odd(), batch_size=2), max_steps=13).global_step == 13


def test_fewer_samples_per_group_can_be_accepted(tiny_model_dir, run_dir):
    data = make_data(Odd(), batch_size=4, group_size=1)
    assert resume(tiny_model_dir, run_dir, data, resume_allow=["group_size"]).global_step == 12
    assert outcomes(run_dir) == {"trained": 48}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"resume": True, "resume_allow": ["batchsize"]}, "resume_allow='batchsize' is nothing a resume refuses"),
        ({"resume_allow": ["batch_size"]}, "without resume=True has no effect"),
    ],
)
def test_what_resume_allow_may_not_hold(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **kwargs)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_resume_with_another_bound_keeps_it_and_loses_nothing(tiny_model_dir, run_dir, staleness):
    recorder = Recorder()
    trainer = resume(tiny_model_dir, run_dir, max_staleness=staleness, callbacks=[recorder])
    assert (trainer.global_step, outcomes(run_dir)) == (12, {"trained": 48})
    assert max(recorder.ages) <= staleness
    with sqlite3.connect(run_dir / "run.db") as db:
        ids = [i for (i,) in db.execute("select prompt_id from groups")]
    assert len(set(ids)) == len(ids) == 48


def test_the_first_step_after_a_resume_has_no_more_groups_than_the_bound_allows(tiny_model_dir, run_dir):
    """CASES 14, in small: version 4, B = 4, S = 3: at most 16 groups that were admitted have not ended."""
    seen = []

    class Watch(RLCallback):
        def on_batch_planned(self, trainer, policy, batch):
            books = trainer.orchestrator.outcomes()
            seen.append(books["running"] + books["kept"])

    resume(tiny_model_dir, run_dir, callbacks=[Watch()])
    assert 0 < max(seen) <= 16


def test_nothing_is_generated_for_steps_before_the_checkpoint_nor_twice(tiny_model_dir, run_dir):
    """CASES 18 and 19: the next prompt is the next one, and every request is for a step that is still to come."""
    with sqlite3.connect(run_dir / "run.db") as db:
        finished = {i for (i,) in db.execute("select group_id from groups where kept_s is not null")}
        (last,) = db.execute("select max(group_id) from groups").fetchone()
    first = []

    class Watch(RLCallback):
        def on_rollout_end(self, trainer, policy, group):
            first.append(group.id)

    data = make_data(Odd(), batch_size=4)
    resume(tiny_model_dir, run_dir, data, callbacks=[Watch()])
    assert finished
    assert finished.isdisjoint(first)
    assert set(first) == set(range(48)) - finished
    assert max(first) > last  # new prompts come after the last one of then


def test_the_engine_serves_the_checkpoint_s_weights_from_its_first_rollout(tiny_model_dir, tmp_path):
    """CASES 19: log-probabilities of the first tokens are those of the checkpoint, not of the model directory."""
    settings = {"max_staleness": 0}
    train = partial(make_policy, tiny_model_dir, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    make_trainer(tmp_path, max_steps=2, **settings).fit(train(), datamodule=make_data(Odd()))
    served = []

    class Watch(RLCallback):
        def on_rollout_end(self, trainer, policy, group):
            served.append(group)

    live = TransformersEngine(str(tiny_model_dir), dtype="float32", threads=1)
    trainer = make_trainer(tmp_path, max_steps=3, resume=True, callbacks=[Watch()], **settings)
    trainer.fit(train(), datamodule=make_data(Odd(), live))
    checkpoint = torch.load(tmp_path / "checkpoints" / "version-000002.ckpt", weights_only=True)
    restored, original = train(), train()
    restored.load_state_dict(checkpoint["state_dict"])
    for group in served:
        assert (group.head, group.tail) == (2, 2)
        for t in group.trajectories:
            n = t.prompt_length
            assert t.logprobs[n:] == pytest.approx(restored.logprobs(t.token_ids)[n - 1 :], abs=1e-4)
            assert t.logprobs[n:] != pytest.approx(original.logprobs(t.token_ids)[n - 1 :], abs=1e-2)
    assert len(served) == 2


def test_random_generators_go_on_where_the_checkpoint_left_them(tiny_model_dir, tmp_path):
    drawn = {}

    class Draw(RLCallback):
        def on_train_batch_end(self, trainer, policy, outputs, batch, batch_idx):
            drawn[trainer.global_step] = torch.rand(1).item(), float(np.random.rand()), random.random()

    def run(seed, **kwargs):
        pl.seed_everything(seed, verbose=False)
        trainer = make_trainer(tmp_path, callbacks=[Draw()], **kwargs)
        trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())

    run(1, max_steps=2)
    expected = torch.rand(1).item(), float(np.random.rand()), random.random()
    run(2, max_steps=3, resume=True)
    assert drawn[3] == expected


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_checkpoint_that_carries_code_is_refused_and_the_code_is_not_run(tiny_model_dir, tmp_path):
    make_trainer(tmp_path, max_steps=2).fit(make_policy(tiny_model_dir), datamodule=make_data())
    path = latest_checkpoint(tmp_path / "checkpoints")
    torch.save(torch.load(path, weights_only=True) | {"callbacks": {"mine": Evil(tmp_path / "pwned")}}, path)
    with pytest.raises(CheckpointError, match="holds more than tensors and plain values"):
        make_trainer(tmp_path, max_steps=3, resume=True).fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert not (tmp_path / "pwned").exists()


def test_the_meaning_of_the_data_is_in_the_record(tiny_model_dir, tmp_path):
    make_trainer(tmp_path, max_steps=1).fit(make_policy(tiny_model_dir), datamodule=make_data(Odd()))
    meaning = Ledger(tmp_path / "run.db").meta()["meaning"]
    assert (meaning["batch_size"], meaning["group_size"]) == (2, 2)
    assert meaning["environment"]["arithmetic"].startswith("81 prompts, sha256 ")


def test_the_bounds_a_run_had_are_in_the_record(tiny_model_dir, run_dir):
    resume(tiny_model_dir, run_dir, max_staleness=1)
    resume(tiny_model_dir, run_dir, max_staleness=1, max_steps=13)
    assert Ledger(run_dir / "run.db").meta()["bounds"] == [[0, 3, "wait"], [4, 1, "wait"]]
