"""The whole loop on a real tiny model, real threads and files; the engine is scripted, so that it is fast."""

import json
import sqlite3
import threading

import pyarrow.dataset
import pytest
import torch
from fit_kit import Recorder, engine, make_data, make_policy, make_trainer, outcomes, output
from lightning.pytorch import Callback

from async_rl.callbacks import EmptyBatchGuard, RLCallback, RunProgress, RunSummary
from async_rl.engines.base import EngineError, SamplingParams
from async_rl.engines.scripted import ScriptedEngine
from async_rl.environments.arithmetic import Arithmetic
from async_rl.jsonl_logger import JsonlLogger
from async_rl.orchestrator.sinks import RolloutFailureError
from async_rl.types import SettingError
from async_rl.weights.parity import WeightParityError


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_fit_trains_every_step_within_the_bound_and_the_ledger_balances(tiny_model_dir, tmp_path, staleness):
    recorder, data = Recorder(), make_data()
    trainer = make_trainer(tmp_path, max_staleness=staleness, callbacks=[recorder])
    policy = make_policy(tiny_model_dir)
    before = [p.detach().clone() for p in policy.parameters()]
    trainer.fit(policy, datamodule=data)
    assert (trainer.end.exit_code, trainer.global_step) == (0, 4)
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert recorder.values("batch_planned") == [0, 1, 2, 3]
    assert recorder.values("policy_published") == [0, 1, 2, 3]  # nobody samples with the last one
    assert max(recorder.ages) <= staleness
    assert recorder.values("drain_end") == [0]  # the horizon admits nothing that no step can train
    assert outcomes(tmp_path) == {"trained": 8}
    table = pyarrow.dataset.dataset(tmp_path / "batches").to_table()
    assert sorted(set(table.column("version").to_pylist())) == [0, 1, 2, 3]
    assert len(set(table.column("group_id").to_pylist())) == 8
    assert data.engines[0].loads[0].version == 0


def test_the_last_version_is_published_for_the_final_evaluation(tiny_model_dir, tmp_path):
    summary, data = RunSummary(), make_data(eval_samples=2, eval_limit=3)
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    trainer = make_trainer(tmp_path, evaluate_at="ends", eval_every=3, callbacks=[summary], logger=logger)
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert [e["version"] for e in trainer.evaluations] == [0, 3, 4]
    assert all(e["samples"] == 6 and e["prompts"] == 3 for e in trainer.evaluations)
    assert summary.figures["eval_end_version"] == 4
    assert 0 <= summary.figures["overlap"] <= 1
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows if "eval/reward" in r] == [0, 3, 4]
    assert [r["step"] for r in rows if "train/loss" in r] == [1, 2, 3, 4]
    assert sum(r["time/ledger_s"] for r in rows if "train/loss" in r) > 0
    assert all(r["age/max"] <= 2 for r in rows if "age/max" in r)
    assert outcomes(tmp_path) == {"trained": 8}  # evaluation is not in the books


def test_a_plain_lightning_callback_gets_the_rl_hooks_it_defines(tiny_model_dir, tmp_path):
    class Plain(Callback):
        seen = 0

        def on_batch_planned(self, trainer, policy, batch):
            self.seen += len(batch.groups)

    plain = Plain()
    make_trainer(tmp_path, callbacks=[plain]).fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert plain.seen == 8


def test_resume_goes_on_at_the_checkpoint_and_generates_nothing_twice(tiny_model_dir, tmp_path):
    make_trainer(tmp_path, max_steps=3).fit(make_policy(tiny_model_dir), datamodule=make_data())
    recorder, data = Recorder(), make_data()
    trainer = make_trainer(tmp_path, max_steps=5, resume=True, callbacks=[recorder])
    policy = make_policy(tiny_model_dir)
    trainer.fit(policy, datamodule=data)
    assert trainer.global_step == 5
    assert recorder.values("version_recovered") == [3]
    assert recorder.values("batch_planned") == [3, 4]
    assert recorder.values("policy_published")[0] == 3
    assert data.engines[0].loads[0].version == 3
    assert len(data.engines[0].requests) == 2 * 2 * 2  # two steps' worth, nothing for steps before
    assert outcomes(tmp_path) == {"trained": 10}
    with sqlite3.connect(tmp_path / "run.db") as db:
        prompts = [p for (p,) in db.execute("select prompt_id from groups")]
    assert len(set(prompts)) == len(prompts) == 10


def test_a_run_that_died_before_its_first_checkpoint_is_trained_from_its_record(tiny_model_dir, tmp_path, caplog):
    caplog.set_level("INFO", logger="async_rl")

    class Die(RLCallback):
        def on_train_batch_end(self, trainer, policy, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                raise KeyError("died")

    with pytest.raises(KeyError, match="died"):
        make_trainer(tmp_path, callbacks=[Die()]).fit(make_policy(tiny_model_dir), datamodule=make_data())
    with sqlite3.connect(tmp_path / "run.db") as db:
        recorded = [json.loads(ids) for (ids,) in db.execute("select group_ids from batches order by batch_id")]
    again = []

    class Watch(RLCallback):
        def on_batch_planned(self, trainer, policy, batch):
            again.append([g.id for g in batch.groups])

    trainer = make_trainer(tmp_path, resume=True, callbacks=[Watch()])
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert trainer.global_step == 4
    assert again[: len(recorded)] == recorded  # the same batches, in order, from the record
    told = [r.getMessage() for r in caplog.records if "going on from" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(
        "going on from version 0 (no checkpoint): 2 recorded batches are trained again from the record"
    )
    assert outcomes(tmp_path) == {"trained": 8}


def test_resume_of_nothing_says_so_before_anything_starts(tiny_model_dir, tmp_path):
    data = make_data()
    with pytest.raises(FileNotFoundError, match="without resume"):
        make_trainer(tmp_path, resume=True).fit(make_policy(tiny_model_dir), datamodule=data)
    assert not data.engines[0].requests


def test_rewards_without_signal_end_the_run_with_the_guard_s_code(tiny_model_dir, tmp_path):
    class AlwaysRight(Arithmetic):
        def reward(self, prompt, completion):
            return 1.0

    trainer = make_trainer(tmp_path, callbacks=[EmptyBatchGuard(2)])
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(AlwaysRight(), filter_zero_variance=True))
    assert trainer.end.exit_code == 3
    assert "no signal" in trainer.end.reason
    assert trainer.global_step == 0
    assert "trained" not in outcomes(tmp_path)


def test_a_reward_that_always_raises_ends_the_run_with_its_traceback(tiny_model_dir, tmp_path):
    class Broken(Arithmetic):
        def reward(self, prompt, completion):
            return {}["missing key of mine"]

    data = make_data(Broken(), max_failures=3)
    with pytest.raises(RolloutFailureError) as failure:
        make_trainer(tmp_path).fit(make_policy(tiny_model_dir), datamodule=data)
    assert isinstance(failure.value.__cause__, KeyError)
    assert "missing key of mine" in str(failure.value.__cause__)
    assert len(data.engines[0].requests) < 40  # seconds, not thousands of prompts


def test_a_callback_that_raises_keeps_its_own_traceback(tiny_model_dir, tmp_path):
    class Broken(RLCallback):
        def on_batch_planned(self, trainer, policy, batch):
            raise ZeroDivisionError("mine")

    trainer = make_trainer(tmp_path, callbacks=[Broken()])
    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert trainer.end.exit_code == 1
    assert not [t.name for t in threading.enumerate() if t.name.startswith(("rollout", "dispatcher", "watcher"))]
    assert "open" not in outcomes(tmp_path)


def test_a_failed_load_ends_the_run_and_names_engine_and_version(tiny_model_dir, tmp_path):
    broken = engine(fail_load=lambda version: RuntimeError("no room") if version == 2 else None)
    trainer = make_trainer(tmp_path, max_steps=20)
    with pytest.raises(RuntimeError, match=r"scripted-0.*version 2|version 2.*scripted-0"):
        trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(with_engine=broken))
    assert trainer.global_step < 6


def test_an_engine_whose_weights_differ_is_refused_before_the_first_rollout(tiny_model_dir, tmp_path):
    class Wrong(ScriptedEngine):
        async def score(self, token_ids):
            return [-9.0] * (len(token_ids) - 1)

    wrong = Wrong(output)
    with pytest.raises(WeightParityError, match="version 0"):
        make_trainer(tmp_path, parity_check=True).fit(
            make_policy(tiny_model_dir), datamodule=make_data(with_engine=wrong)
        )
    assert not wrong.requests


def test_an_engine_that_does_not_start_ends_the_run(tiny_model_dir, tmp_path):
    class NoStart(ScriptedEngine):
        async def start(self):
            raise EngineError("engine scripted-0: no such device")

    with pytest.raises(EngineError, match="no such device"):
        make_trainer(tmp_path).fit(make_policy(tiny_model_dir), datamodule=make_data(with_engine=NoStart(output)))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"stale_policy": "allow"}, "acknowledge_staleness"),
        ({"max_epochs": 3}, "max_epochs=3 has no meaning here; use max_steps"),
        ({"limit_val_batches": 2}, "limit_val_batches=2 has no meaning here; use evaluate_at"),
        ({"devices": 2}, "devices"),
    ],
)
def test_impossible_trainers_are_refused(tiny_model_dir, tmp_path, bad, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **bad).fit(make_policy(tiny_model_dir), datamodule=make_data())


def test_data_smaller_than_one_batch_is_refused_before_the_engine_starts(tiny_model_dir, tmp_path):
    class NoStart(ScriptedEngine):
        async def start(self):
            raise AssertionError("started")

    data = make_data(with_engine=NoStart(output), batch_size=100, epochs=1)
    with pytest.raises(ValueError, match="batch_size"):
        make_trainer(tmp_path).fit(make_policy(tiny_model_dir), datamodule=data)


def test_prompts_used_up_end_the_run_cleanly(tiny_model_dir, tmp_path):
    trainer = make_trainer(tmp_path, max_steps=100)
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(epochs=1, batch_size=20))
    assert trainer.global_step == 4  # 81 sums: four batches of 20, the last one is dropped
    assert trainer.end.exit_code == 0
    assert outcomes(tmp_path) == {"trained": 80, "dropped": 1}


@pytest.mark.parametrize("evaluate_at", ["never", "ends"])  # Lightning validates once more when it is told to stop
def test_early_stopping_by_an_ordinary_callback_ends_the_run_cleanly(tiny_model_dir, tmp_path, evaluate_at):
    class StopAtTwo(Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.should_stop = trainer.global_step == 2

    trainer = make_trainer(tmp_path, max_steps=50, callbacks=[StopAtTwo()], evaluate_at=evaluate_at)
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert (trainer.global_step, trainer.end.exit_code) == (2, 0)
    assert "should_stop" in trainer.end.reason
    assert set(outcomes(tmp_path)) <= {"trained", "saved"}


class StopAtOnce(Callback):
    def setup(self, trainer, policy, stage):
        trainer.stop("received SIGTERM", exit_code=75)


def test_a_run_stopped_before_its_first_batch_is_no_crash_and_goes_on_from_its_record(tiny_model_dir, tmp_path, caplog):
    trainer = make_trainer(tmp_path, callbacks=[StopAtOnce()])
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert (trainer.end.exit_code, trainer.end.reason) == (75, "received SIGTERM")
    assert f"go on with resume=true run_dir={tmp_path}" in caplog.text
    assert "AsyncRLTrainer(..., resume=True)" in caplog.text
    trainer = make_trainer(tmp_path, resume=True)
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert (trainer.end.exit_code, trainer.global_step, outcomes(tmp_path)) == (0, 4, {"trained": 8})


def test_an_interrupted_replay_has_nothing_to_go_on_with(tiny_model_dir, tmp_path, caplog):
    make_trainer(tmp_path / "run", max_steps=1).fit(make_policy(tiny_model_dir), datamodule=make_data())
    trainer = make_trainer(tmp_path / "replay", replay=tmp_path / "run", callbacks=[StopAtOnce()])
    trainer.fit(make_policy(tiny_model_dir))
    assert trainer.end.exit_code == 1
    assert "resume" not in caplog.text.rpartition("received SIGTERM")[2]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(temperature=0.6), "temperature=0.6"),
        (SamplingParams(temperature=0.0), "temperature=0 makes the group_size=2 rollouts"),
        (SamplingParams(top_p=0.8), "top_p=0.8"),
        (SamplingParams(top_k=20), "top_k=20"),
        (SamplingParams(min_p=0.1), "min_p=0.1"),
    ],
)
def test_sampling_that_the_trainer_does_not_follow_is_refused(tiny_model_dir, tmp_path, sampling, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).fit(make_policy(tiny_model_dir), datamodule=make_data(sampling=sampling))


class NoStart(ScriptedEngine):
    async def start(self):
        raise AssertionError("started")


@pytest.mark.parametrize("max_steps", [1, 2])
def test_resuming_a_finished_run_says_so_and_starts_no_engine(tiny_model_dir, tmp_path, caplog, capsys, max_steps):
    first = make_policy(tiny_model_dir)
    make_trainer(tmp_path, max_steps=2).fit(first, datamodule=make_data())
    summary = json.loads((tmp_path / "run.json").read_text())["summary"]
    policy = make_policy(tiny_model_dir)
    trainer = make_trainer(tmp_path, max_steps=max_steps, resume=True, callbacks=[RunProgress()])
    trainer.fit(policy, datamodule=make_data(with_engine=NoStart(output)))
    assert f"nothing to train: the run is at version 2 of max_steps={max_steps} already" in caplog.text
    assert (trainer.end.exit_code, trainer.global_step) == (0, 2)
    assert trainer.end.reason.startswith("nothing to train")
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), policy.parameters(), strict=True))
    assert "starting the engine" not in capsys.readouterr().out
    assert json.loads((tmp_path / "run.json").read_text())["summary"] == summary != {}


def test_resuming_a_run_whose_prompts_are_used_up_starts_no_engine(tiny_model_dir, tmp_path, caplog):
    settings = {"epochs": 1, "batch_size": 20}
    make_trainer(tmp_path, max_steps=100).fit(make_policy(tiny_model_dir), datamodule=make_data(**settings))
    trainer = make_trainer(tmp_path, max_steps=100, resume=True)
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(with_engine=NoStart(output), **settings))
    assert (trainer.end.exit_code, trainer.global_step) == (0, 4)
    assert "nothing to train: the prompts are used up" in caplog.text


def test_a_directory_with_a_record_is_refused_before_an_engine_starts(tiny_model_dir, tmp_path):
    make_trainer(tmp_path, max_steps=1).fit(make_policy(tiny_model_dir), datamodule=make_data())
    with pytest.raises(SettingError) as refused:
        make_trainer(tmp_path).fit(make_policy(tiny_model_dir), datamodule=make_data(with_engine=NoStart(output)))
    assert str(refused.value) == (
        f"run_dir={tmp_path} holds the record of an earlier run: go on with it (resume=True), or give another run_dir"
    )
