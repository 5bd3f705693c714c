"""What ``fit`` shows and leaves behind without being asked to, and how each of it is switched off."""

import json
import re

import pytest
from fit_kit import RewardBySeed, make_data, make_policy, make_trainer
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from async_rl.callbacks import DrainCallback, EmptyBatchGuard, ResumeVersionRecovery, RunProgress, RunSummary
from async_rl.jsonl_logger import JsonlLogger

OURS = (RunProgress, RunSummary, DrainCallback, EmptyBatchGuard, ResumeVersionRecovery)


def record(run_dir):
    return json.loads((run_dir / "run.json").read_text())


def ours(trainer):
    return [type(c) for c in trainer.callbacks if isinstance(c, (*OURS, ProgressBar))]


def test_a_run_from_python_shows_its_progress_and_leaves_what_the_command_leaves(tiny_model_dir, tmp_path, capsys):
    defaults = {"logger": None, "enable_progress_bar": True, "evaluate_at": "ends"}
    trainer = make_trainer(tmp_path, max_steps=2, **defaults)
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(eval_limit=2))
    shown = capsys.readouterr().out
    for part in (
        "step    1/2",
        "step    2/2",
        "evaluation at version 2:",
        " mean reward, pass@4 ",
        "run ended: max_steps=2 reached",
        "4 trained",
    ):
        assert part in shown
    written = record(tmp_path)
    assert (written["exit_code"], written["exit_reason"]) == (0, "max_steps=2 reached")
    assert (written["summary"]["steps"], [e["version"] for e in written["evaluations"]]) == (2, [0, 2])
    assert (written["summary"]["groups_trained"], written["summary"]["groups_failed"]) == (4, 0)
    assert written["facts"]["data"] == "RewardBySeed"
    assert written["facts"]["steps"] == "2 of 2 x 2 rollouts, max_staleness 2"
    assert str(tiny_model_dir) in written["facts"]["model"]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} >= {1, 2}
    assert list((tmp_path / "tensorboard").iterdir())


def test_switched_off_a_run_shows_nothing_but_keeps_its_record(tiny_model_dir, tmp_path, capsys):
    trainer = make_trainer(tmp_path, max_steps=2, logger=False, enable_progress_bar=False)
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert capsys.readouterr().out == ""
    assert record(tmp_path)["summary"]["steps"] == 2
    assert not (tmp_path / "metrics.jsonl").exists()
    assert not (tmp_path / "tensorboard").exists()


def test_a_mean_reward_looks_the_same_before_and_after_a_reward_beyond_1_and_a_resume(tiny_model_dir, tmp_path, capsys):
    class Sum(RewardBySeed):
        factor = 1.0

        def reward(self, prompt, completion):
            return self.factor * super().reward(prompt, completion)

    class Grows(Callback):
        def on_train_batch_end(self, *args):
            environment.factor = 1.5

    environment = Sum()
    for steps, resume in ((2, False), (4, True)):
        environment.factor = 1.0
        trainer = make_trainer(
            tmp_path, max_steps=steps, resume=resume, enable_progress_bar=True, eval_every=1, callbacks=[Grows()]
        )
        trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(environment, eval_limit=2))
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluation" in line]
    assert len(lines) >= 6  # four as they come, the last also in the tables
    for line in lines:
        assert re.search(r"\d\.\d{3}", line)
        assert "%" not in line.partition("pass@")[0]


def test_the_record_says_how_a_run_failed_and_keeps_the_runs_before(tiny_model_dir, tmp_path):
    class Broken(Callback):
        def on_train_batch_end(self, trainer, *args):
            raise ZeroDivisionError("mine")

    make_trainer(tmp_path, max_steps=1).fit(make_policy(tiny_model_dir), datamodule=make_data())
    trainer = make_trainer(tmp_path, max_steps=2, resume=True, callbacks=[Broken()])
    with pytest.raises(ZeroDivisionError, match="mine"):
        trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    written = record(tmp_path)
    assert (written["exit_code"], written["exit_reason"]) == (1, "ZeroDivisionError: mine")
    assert [run["exit_reason"] for run in written["earlier"]] == ["max_steps=1 reached"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"enable_progress_bar": True}, list(OURS)),
        ({}, list(OURS[1:])),
        ({"enable_progress_bar": True, "callbacks": [RunSummary()]}, [RunSummary, RunProgress, *OURS[2:]]),
        ({"enable_progress_bar": True, "callbacks": [RichProgressBar()]}, [RichProgressBar, *OURS[1:]]),
        ({"callbacks": DrainCallback(timeout_s=1.0)}, [DrainCallback, RunSummary, *OURS[3:]]),
        ({"callbacks": [RunProgress()], "default_callbacks": False}, [RunProgress]),
    ],
)
def test_each_callback_is_there_once_and_the_users_goes_first(tmp_path, arguments, expected):
    assert ours(make_trainer(tmp_path, **arguments)) == expected


@pytest.mark.parametrize(
    ("logger", "expected"),
    [
        (None, [TensorBoardLogger, JsonlLogger]),
        (True, [TensorBoardLogger, JsonlLogger]),
        (False, []),
        (CSVLogger("."), [CSVLogger]),
    ],
)
def test_loggers_given_take_the_place_of_the_default_ones(tmp_path, logger, expected):
    assert [type(found) for found in make_trainer(tmp_path, logger=logger).loggers] == expected
