"""A resume makes up for the evaluation that an earlier process did not finish, and makes none twice."""

import json
import sqlite3

import pytest
from fit_kit import RewardBySeed, engine, make_data, make_policy, make_trainer, output
from lightning.pytorch import Callback

from async_rl.callbacks.progress import RunProgress
from async_rl.engines.scripted import ScriptedEngine


class NoStart(ScriptedEngine):
    async def start(self):
        raise AssertionError("started")


class StopAt(RewardBySeed):
    """Asks the trainer to stop, as SIGTERM does, when a version is evaluated."""

    def __init__(self, version=-1):
        super().__init__()
        self.version = version
        self.trainer = None

    async def rollout(self, prompt, chat):
        trainer = self.trainer
        if trainer is not None and trainer.validating and trainer.global_step == self.version:
            trainer.stop("received SIGTERM", exit_code=75)
        return await super().rollout(prompt, chat)


class DieAfter(Callback):
    """Raises once a version is evaluated, as late as a killed process may die with the evaluation on the disk."""

    def __init__(self, version):
        self.version = version

    def on_validation_end(self, trainer, policy):
        if trainer.global_step == self.version and trainer.evaluations[-1:]:
            raise KeyError("died")


def fit(model_dir, run_dir, stop_at=-1, with_engine=None, data=None, **trainer):
    """A run with ``stop_at`` stopped in the evaluation of that version; its trainer."""
    environment = StopAt(stop_at)
    environment.trainer = trainer = make_trainer(run_dir, **{"evaluate_at": "ends"} | trainer)
    settings = {"eval_limit": 2, "eval_samples": 1, "with_engine": with_engine} | (data or {})
    trainer.fit(make_policy(model_dir), datamodule=make_data(environment, **settings))
    return trainer


def evaluated(trainer):
    return [e["version"] for e in trainer.evaluations]


def record(run_dir):
    return json.loads((run_dir / "run.json").read_text())


def finishes(trainer, version, made):
    assert (trainer.end.exit_code, trainer.global_step, evaluated(trainer)) == (0, version, made)


def test_the_last_evaluation_is_made_up_for_once(tiny_model_dir, tmp_path, caplog, capsys):
    stopped = fit(tiny_model_dir, tmp_path, stop_at=3, max_steps=3)
    assert (stopped.end.exit_code, evaluated(stopped)) == (75, [0])
    before = record(tmp_path)["summary"]
    data_engine = engine()
    late = fit(tiny_model_dir, tmp_path, max_steps=3, resume=True, with_engine=data_engine, callbacks=[RunProgress()])
    finishes(late, 3, [3])
    assert late.max_steps == 3
    assert {r.request_id[:2] for r in data_engine.requests} == {"g-"}  # nothing but the evaluation was sampled
    told = "raise max_steps to go on; the evaluation at version 3 was not finished: it is made up for"
    assert f"nothing to train: the run is at version 3 of max_steps=3 already; {told}" in caplog.text
    assert "starting the engine" in capsys.readouterr().out
    now = record(tmp_path)
    assert (now["exit_code"], [e["version"] for e in now["evaluations"]]) == (0, [0, 3])
    end = late.evaluations[0]["reward"]
    assert now["summary"] == before | {"eval_end": end, "eval_end_version": 3, "eval_end_failures": 0.0}
    again = fit(tiny_model_dir, tmp_path, max_steps=3, resume=True, with_engine=NoStart(output))
    finishes(again, 3, [])
    assert (record(tmp_path)["summary"], record(tmp_path)["evaluations"]) == (now["summary"], now["evaluations"])


def test_one_that_is_stopped_again_is_owed_still(tiny_model_dir, tmp_path):
    for _ in range(2):
        stopped = fit(tiny_model_dir, tmp_path, stop_at=2, max_steps=2, resume=(tmp_path / "run.db").exists())
        assert (stopped.end.exit_code, record(tmp_path)["exit_code"]) == (75, 75)
    finishes(fit(tiny_model_dir, tmp_path, max_steps=2, resume=True), 2, [2])


def test_the_last_evaluation_of_used_up_prompts_is_made_up_for(tiny_model_dir, tmp_path):
    settings = {"max_steps": 100, "data": {"epochs": 1, "batch_size": 20}}
    assert fit(tiny_model_dir, tmp_path, stop_at=4, **settings).end.exit_code == 75
    finishes(fit(tiny_model_dir, tmp_path, resume=True, **settings), 4, [4])
    finishes(fit(tiny_model_dir, tmp_path, resume=True, with_engine=NoStart(output), **settings), 4, [])


def test_an_evaluation_between_steps_is_made_up_for_before_training_goes_on(tiny_model_dir, tmp_path, caplog):
    caplog.set_level("INFO", logger="async_rl")
    settings = {"max_steps": 5, "eval_every": 2, "evaluate_at": "never"}
    assert fit(tiny_model_dir, tmp_path, stop_at=2, **settings).end.exit_code == 75
    finishes(fit(tiny_model_dir, tmp_path, resume=True, **settings), 5, [2, 4])
    assert "eval_start" not in record(tmp_path)["summary"]
    assert caplog.text.count("the evaluation at version 2 was not finished: it is made up for") == 1


def test_the_last_one_by_eval_every_is_made_up_for_though_nothing_is_left_to_train(tiny_model_dir, tmp_path):
    settings = {"max_steps": 4, "eval_every": 2, "evaluate_at": "never"}
    assert fit(tiny_model_dir, tmp_path, stop_at=4, **settings).end.exit_code == 75
    finishes(fit(tiny_model_dir, tmp_path, resume=True, **settings), 4, [4])
    finishes(fit(tiny_model_dir, tmp_path, resume=True, with_engine=NoStart(output), **settings), 4, [])


def test_a_resume_that_goes_on_to_more_steps_does_not_owe_the_end_of_fewer(tiny_model_dir, tmp_path):
    assert fit(tiny_model_dir, tmp_path, stop_at=3, max_steps=3).end.exit_code == 75
    finishes(fit(tiny_model_dir, tmp_path, max_steps=5, resume=True), 5, [5])


@pytest.mark.parametrize("finished", [False, True])
def test_the_first_evaluation_is_made_once(tiny_model_dir, tmp_path, finished):
    class StopAtOnce(Callback):
        def on_validation_end(self, trainer, policy):
            trainer.stop("received SIGTERM", exit_code=75)

    stopped = fit(tiny_model_dir, tmp_path, -1 if finished else 0, callbacks=[StopAtOnce()])
    assert (stopped.end.exit_code, stopped.global_step, evaluated(stopped)) == (75, 0, [0] * finished)
    finishes(fit(tiny_model_dir, tmp_path, resume=True), 4, [4] if finished else [0, 4])
    summary = record(tmp_path)["summary"]
    assert (summary["eval_start_version"], summary["eval_end_version"]) == (0, 4)


def test_a_finished_evaluation_between_steps_is_not_made_again(tiny_model_dir, tmp_path):
    class StopBehind(Callback):
        def on_validation_end(self, trainer, policy):
            trainer.stop("received SIGTERM", exit_code=75)

    settings = {"max_steps": 4, "eval_every": 2, "evaluate_at": "never"}
    stopped = fit(tiny_model_dir, tmp_path, callbacks=[StopBehind()], **settings)
    assert (stopped.end.exit_code, evaluated(stopped)) == (75, [2])
    finishes(fit(tiny_model_dir, tmp_path, resume=True, **settings), 4, [4])


def test_what_was_evaluated_after_the_checkpoint_is_evaluated_again(tiny_model_dir, tmp_path):
    settings = {"max_steps": 3, "checkpoint_every": 2}
    with pytest.raises(KeyError, match="died"):
        fit(tiny_model_dir, tmp_path, callbacks=[DieAfter(3)], **settings)
    stopped = fit(tiny_model_dir, tmp_path, stop_at=3, resume=True, **settings)
    assert (stopped.end.exit_code, stopped.start_version, evaluated(stopped)) == (75, 2, [])
    finishes(fit(tiny_model_dir, tmp_path, resume=True, **settings), 3, [3])


def test_the_result_of_a_run_that_died_with_everything_saved_is_not_lost(tiny_model_dir, tmp_path):
    settings = {"max_steps": 2, "checkpoint_every": 1}
    with pytest.raises(KeyError, match="died"):
        fit(tiny_model_dir, tmp_path, callbacks=[DieAfter(2)], **settings)
    (tmp_path / "run.json").unlink()  # a killed process has written no results there
    finishes(fit(tiny_model_dir, tmp_path, resume=True, with_engine=NoStart(output), **settings), 2, [])
    assert record(tmp_path)["summary"]["eval_end_version"] == 2
    assert [e["version"] for e in record(tmp_path)["evaluations"]] == [2]


def test_nothing_is_started_for_a_finished_run_of_an_earlier_version(tiny_model_dir, tmp_path):
    fit(tiny_model_dir, tmp_path, max_steps=2)
    with sqlite3.connect(tmp_path / "run.db") as db:
        db.execute("delete from meta where key = 'evaluations'")
    finishes(fit(tiny_model_dir, tmp_path, max_steps=2, resume=True, with_engine=NoStart(output)), 2, [])
