"""Runs that will not end by themselves: each ends in time, with the right code, and says what would not stop."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from stubborn_runs import CASES, LONG_TIMEOUT_S, SAVE_TIMEOUT_S, TIMEOUT_S

from async_rl.callbacks.checkpoint import latest_checkpoint

SCRIPT = Path(__file__).parent / "stubborn_runs.py"


@pytest.fixture(scope="module")
def runs(tiny_model_dir, tmp_path_factory):
    """All cases at once: directory, exit code and seconds from the last step to the exit, by case."""
    directory = tmp_path_factory.mktemp("stubborn")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tiny_model_dir), str(directory)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ends = {}
    for case, (code, ended_s) in json.loads(done.stdout).items():
        place = directory / case.replace(" ", "_")
        ends[case] = place, code, ended_s - float((place / "out").read_text())
    return ends


@pytest.mark.parametrize("case", CASES)
def test_every_run_ends_in_time_and_nothing_is_left_open(runs, case):
    place, code, seconds = runs[case]
    assert code in (1, 75), (place / "err").read_text()
    assert seconds < TIMEOUT_S + 20  # the interpreter's own way out, on a busy machine; what hangs does so for an hour
    with sqlite3.connect(place / "run" / "run.db") as db:
        (trained,) = db.execute("select count(*) from groups where outcome = 'trained'").fetchone()
    assert trained >= 4


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("environment blocks a thread", "go on with resume=true"),
        ("environment swallows its cancellation", "rollouts went on although they were cancelled"),
        ("environment blocks an executor", "ending it with exit code 75"),
    ],
)
def test_what_user_code_left_behind_is_no_error_of_the_run(runs, case, message):
    place, code, _ = runs[case]
    assert code == 75
    assert latest_checkpoint(place / "run" / "checkpoints") is not None
    printed = (place / "err").read_text()
    assert message in printed
    assert "Task was destroyed" not in printed


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("environment blocks the event loop", "did not stop within"),
        ("engine does not close", "scripted-0"),
        ("callback hangs", "MainThread is in on_train_end at "),
        ("callback hangs with the interpreter lock", "stubborn_runs.py"),
        ("save hangs", "MainThread is in save_checkpoint at "),
    ],
)
def test_a_forced_shutdown_is_exit_code_1_and_says_what_would_not_stop(runs, case, message):
    place, code, _ = runs[case]
    assert code == 1
    assert message in (place / "err").read_text()


def test_a_last_checkpoint_that_hangs_has_a_deadline_of_its_own(runs):
    _, _, seconds = runs["save hangs"]
    assert SAVE_TIMEOUT_S < seconds < LONG_TIMEOUT_S / 2
