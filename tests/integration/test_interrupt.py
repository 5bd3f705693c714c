"""Real signals to real processes: while they wait for rollouts, evaluate, or have rollouts in flight."""

import json
import math
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from fit_kit import Recorder, make_policy, outcomes
from interrupted_runs import CASES, SHARED, Paced, make_run

from async_rl.callbacks.checkpoint import checkpoints

SCRIPT = Path(__file__).parent / "interrupted_runs.py"
WITHIN_S = 30.0
"""From the signal to the begin of the end: a tenth of a second; what the runs wait for takes them days."""


class Ended:
    """How a run ended: exit code, what it printed, the seconds from its last signal to the end of training and to its
    exit, and its directory."""

    def __init__(self, place, code, sent, ended_s):
        self.code, self.run_dir, self.printed = code, place / "run", (place / "err").read_text()
        ending = place / "ending"
        self.noticed_s = float(ending.read_text()) - sent[0] if ending.exists() else math.inf
        self.exit_s = ended_s - sent[-1]

    @property
    def checkpoints(self):
        return [path.name for path in checkpoints(self.run_dir / "checkpoints")]


@pytest.fixture(scope="module")
def runs(tiny_model_dir, tmp_path_factory):
    """All cases at once; what a second process was told of a run that went on, and which process that was."""
    directory = tmp_path_factory.mktemp("interrupted")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tiny_model_dir), str(directory)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    ends = {case: Ended(directory / case.replace(" ", "_"), *end) for case, end in results["ends"].items()}
    return ends, results["told"], results["pid"]


@pytest.mark.parametrize("case", ["waiting, SIGINT", "waiting, SIGTERM"])
def test_a_signal_while_waiting_saves_a_checkpoint_and_exits_with_75(runs, case):
    run = runs[0][case]
    assert run.code == 75, run.printed
    name = CASES[case].signals[0].name
    assert f"{name}: finishing and saving; again = stop at once (nothing more is saved)\n" in run.printed
    assert f"received {name}; go on with resume=true" in run.printed
    assert len(run.checkpoints) == 1
    ended = outcomes(run.run_dir)
    assert set(ended) == {"trained", "saved"}
    assert run.checkpoints == [f"version-{ended['trained'] // 2:06d}.ckpt"]


@pytest.mark.parametrize("case", [case for case in CASES if case != "rollouts in flight"])
def test_a_signal_is_noticed_whatever_the_run_waits_for(runs, case):
    run = runs[0][case]
    assert run.noticed_s < WITHIN_S, run.printed


def test_a_second_signal_exits_at_once(runs):
    run = runs[0]["waiting, SIGINT twice"]
    assert run.code == 128 + CASES["waiting, SIGINT twice"].signals[1]
    assert run.exit_s < WITHIN_S  # not after shutdown_timeout_s
    assert run.printed.endswith("SIGINT again: stopped at once\n")
    record = json.loads((run.run_dir / "run.json").read_text())
    assert (record["exit_code"], record["exit_reason"]) == (130, "stopped at once by a second SIGINT")


def test_an_engine_that_will_not_close_is_left_behind_in_time_and_the_exit_code_says_so(runs):
    run = runs[0]["engine does not close"]
    assert run.code == 1
    assert "did not stop within" in run.printed


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    ("when", "saved"),
    [
        ("first evaluation", []),
        ("evaluation between steps", ["version-000002.ckpt"]),
        ("last evaluation", ["version-000002.ckpt"]),
    ],
)
def test_a_signal_cuts_an_evaluation_short_and_nothing_else(runs, when, number, saved):
    run = runs[0][f"{when}, {number}"]
    assert run.code == 75, run.printed
    assert "Traceback" not in run.printed
    assert run.checkpoints == saved
    record = json.loads((run.run_dir / "run.json").read_text())
    assert (record["exit_code"], record["exit_reason"]) == (75, f"received {number}")
    assert [e["version"] for e in record["evaluations"]] == ([0] if when == "last evaluation" else [])
    assert outcomes(run.run_dir).get("trained", 0) == 4 * len(saved)
    assert set(outcomes(run.run_dir)) <= {"trained", "saved"}


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    ("when", "made", "last"),
    [("first evaluation", [0, 9], 9), ("evaluation between steps", [2, 4, 6, 8], 9), ("last evaluation", [2], 2)],
)
def test_a_resume_makes_up_for_the_evaluation_that_a_signal_cut_short(
    runs, tiny_model_dir, tmp_path, when, number, made, last
):
    case = f"{when}, {number}"
    run_dir = shutil.copytree(runs[0][case].run_dir, tmp_path / "run")
    trainer, data = make_run(run_dir, Paced(), resume=True, **CASES[case].trainer)
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert (trainer.end.exit_code, trainer.global_step) == (0, last)
    assert [e["version"] for e in trainer.evaluations] == made
    record = json.loads((trainer.run_dir / "run.json").read_text())
    before = [0] if when == "last evaluation" else []  # which is kept, as nothing was left to train
    assert [e["version"] for e in record["evaluations"]] == [*before, *made]
    assert record["summary"].get("eval_end_version") == (None if when == "evaluation between steps" else last)


def test_what_finishes_while_the_run_ends_is_kept_and_never_asked_for_again(runs, tiny_model_dir):
    run = runs[0]["rollouts in flight"]
    assert run.code == 75, run.printed
    with sqlite3.connect(run.run_dir / "run.db") as db:
        endings = db.execute("select group_id, outcome, reason from endings").fetchall()
        (version,) = db.execute("select count(*) from batches where outcome = 'trained'").fetchone()
        slow = {i for (i,) in db.execute("select group_id from trajectories where ended_s - started_s >= 0.5")}
    finished = {i for i, outcome, reason in endings if (outcome, reason) == ("saved", "finished")}
    assert finished & slow  # begun before the signal, ended after it
    assert {(outcome, reason) for _, outcome, reason in endings} == {("trained", ""), ("saved", "finished")}
    assert run.checkpoints == [f"version-{version:06d}.ckpt"]
    recorder = Recorder()
    trainer, data = make_run(run.run_dir, Paced(), resume=True, callbacks=[recorder])
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert (trainer.end.exit_code, trainer.global_step) == (0, 9)
    assert recorder.values("version_recovered") == [version]
    asked = {int(r.request_id[1:].split("-")[0]) for r in data.engines[0].requests}
    assert asked.isdisjoint({i for i, _, _ in endings})
    assert outcomes(run.run_dir) == {"trained": 18}


def test_a_run_that_goes_on_is_not_gone_on_with_by_another_process(runs):
    ends, told, pid = runs
    run_dir = ends[SHARED].run_dir
    assert told.startswith(f"run_dir={run_dir} is in use by process {pid} on ")
    assert ends[SHARED].code == 75
