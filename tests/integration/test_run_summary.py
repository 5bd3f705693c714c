"""The closing table and the summary in run.json against run.db: the groups of a run, whatever processes it took."""

import json

import pytest
from fit_kit import engine, make_data, make_policy, make_trainer, outcomes

from async_rl.callbacks import DrainCallback, RLCallback

ENDED = ("trained", "filtered", "failed", "dropped", "saved")


class Ends(RLCallback):
    """Ends the run at a version: with an error, or as a user's callback may."""

    def __init__(self, at, with_error=False):
        self.at, self.with_error = at, with_error

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.at:
            if self.with_error:
                raise KeyError("died")
            trainer.should_stop = True


@pytest.fixture
def fit(tiny_model_dir, tmp_path):
    def run(*callbacks, **kwargs):
        trainer = make_trainer(
            tmp_path, **{"max_steps": 6, "enable_progress_bar": True} | kwargs, callbacks=[DrainCallback(0), *callbacks]
        )
        trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(with_engine=engine(latency_s=0.05)))
        return json.loads((tmp_path / "run.json").read_text())["summary"]

    return run


def check(summary, run_dir):
    recorded = outcomes(run_dir)
    assert {name: summary[f"groups_{name}"] for name in ENDED} == {name: recorded.get(name, 0) for name in ENDED}
    assert summary["groups_admitted"] == sum(recorded.values())


def row(shown, name):
    return next(line.split("│")[2].strip() for line in shown.splitlines() if line.startswith(f"│ {name} "))


def test_groups_saved_for_a_resume_are_counted(fit, tmp_path, capsys):
    summary = fit(Ends(2))
    check(summary, tmp_path)
    assert (summary["groups_trained"], summary["start_version"], summary["steps"]) == (4, 0, 2)
    assert summary["groups_saved"] > 0
    shown = capsys.readouterr().out
    admitted, saved = summary["groups_admitted"], summary["groups_saved"]
    assert row(shown, "groups") == f"{admitted} admitted: 4 trained, {saved} saved for a resume"
    assert row(shown, "steps").endswith(" s, up to version 2")


def test_a_resume_says_which_figures_are_those_of_the_whole_run(fit, tmp_path, capsys):
    with pytest.raises(KeyError, match="died"):
        fit(Ends(5, with_error=True), checkpoint_every=2)
    summary = fit(Ends(5), resume=True)  # goes on from version 4, and stops when the recorded batch is trained
    check(summary, tmp_path)
    assert (summary["start_version"], summary["steps"], summary["groups_trained"]) == (4, 1, 10)
    assert summary["groups_saved"] == summary["groups_admitted"] - 10 > 0
    capsys.readouterr()
    summary = fit(resume=True)
    check(summary, tmp_path)
    assert (summary["start_version"], summary["steps"], summary["groups_saved"]) == (5, 1, 0)
    shown = capsys.readouterr().out
    assert row(shown, "groups, whole run") == "12 admitted: 12 trained"
    assert row(shown, "steps").startswith("1 in ")
    assert row(shown, "steps").endswith(" s, since the resume, version 5 to 6")
