"""Exit codes of the command, each with what it prints and leaves behind; real runs of a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.callbacks.checkpoint import latest_checkpoint

SCRIPT = Path(__file__).parent / "command_runs.py"
RUNS = {
    "finished": ["max_steps=2", "environment=custom", "environment._target_=command_runs.BySample"],
    "also finished": ["max_steps=2", "environment=custom", "environment._target_=command_runs.BySample"],
    "broken callback": [
        *("max_steps=4", "environment=custom", "environment._target_=command_runs.BySample"),
        "+callbacks.mine._target_=command_runs.BrokenCallback",
    ],
    "broken reward": ["environment=custom", "environment._target_=command_runs.BrokenReward"],
    "broken reward in an evaluation": [
        *("environment=custom", "environment._target_=command_runs.BrokenReward", "run.evaluation.at=ends"),
    ],
    "no prompts": ["environment=custom", "environment._target_=command_runs.NoPrompts"],
    "None for prompts": ["environment=custom", "environment._target_=command_runs.NoneForPrompts"],
    "no signal": [
        *("environment=custom", "environment._target_=command_runs.AlwaysRight"),
        "rollout.filter_zero_variance=true",
    ],
    "terminated": [
        *("max_steps=9", "environment=custom", "environment._target_=command_runs.BySample"),
        "+callbacks.mine._target_=command_runs.Terminates",
    ],
    "interrupted": [
        *("environment=custom", "environment._target_=command_runs.BySample"),
        "+callbacks.mine={_target_: command_runs.Stops}",
    ],
    "interrupted twice": [
        *("environment=custom", "environment._target_=command_runs.BySample"),
        "+callbacks.mine={_target_: command_runs.Stops, times: 2}",
    ],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Exit code, error output and run.json of every run, and its directory."""
    directory = tmp_path_factory.mktemp("command")
    own = {"ASYNC_RL_CACHE": str(directory / "cache"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory)],
        input=json.dumps(RUNS), env=os.environ | own, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = {}
    for name, code in json.loads(done.stdout).items():
        printed = (directory / name / "err").read_text()
        if code == 2:
            ends[name] = code, printed, "", directory / name
            continue
        (run_dir,) = (directory / name).glob("runs/*/*")
        record = json.loads((run_dir / "run.json").read_text())
        assert record["exit_code"] == code, name
        ends[name] = code, printed, record["exit_reason"], run_dir
    return ends


def test_0_is_a_run_that_finished_and_two_started_at_once_do_not_collide(runs):
    for name in ("finished", "also finished"):
        code, printed, reason, _ = runs[name]
        assert (code, reason) == (0, "max_steps=2 reached"), printed
        assert "Traceback" not in printed


def test_1_is_an_error_a_callback_s_with_its_own_traceback(runs):
    code, printed, reason, _ = runs["broken callback"]
    assert (code, reason) == (1, "ZeroDivisionError: a bug of mine")
    assert 'raise ZeroDivisionError("a bug of mine")' in printed
    assert printed.rstrip().endswith("ZeroDivisionError: a bug of mine")


@pytest.mark.parametrize(
    ("name", "ended"),
    [
        ("broken reward", "RolloutFailureError: 17 rollout attempts in a row failed (max_failures=16)"),
        ("broken reward in an evaluation", "EvaluationError: evaluation at version 0: "),
    ],
)
def test_a_reward_that_raises_shows_the_user_s_lines_and_what_it_ended(runs, name, ended):
    code, printed, reason, run_dir = runs[name]
    assert code == 1
    assert reason.startswith(ended)
    traceback = printed[printed.index("Traceback") :]
    assert 'return {}["missing key of mine"]' in traceback
    assert "lightning" not in traceback
    assert len(traceback.splitlines()) < 10
    log = (run_dir / "run.log").read_text()
    assert 'return {}["missing key of mine"]' in log
    assert "lightning" in log  # all of it


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("no prompts", "has no training prompts"),
        (
            "None for prompts",
            "environment 'arithmetic': NoneForPrompts.prompts('train') returned None; return a list",
        ),
    ],
)
def test_2_is_a_setting_that_is_refused_in_one_message_and_leaves_nothing(runs, run, message):
    code, printed, _, directory = runs[run]
    assert code == 2
    assert message in printed
    assert "Traceback" not in printed
    assert {path.name for path in directory.iterdir()} == {"out", "err"}


def test_3_is_a_guard_that_says_what_it_saw(runs):
    code, printed, reason, _ = runs["no signal"]
    assert code == 3
    assert reason.startswith("3 empty batches in a row: no signal")
    assert reason in printed


def test_75_is_an_interruption_with_a_checkpoint_to_go_on_from(runs):
    code, printed, reason, run_dir = runs["terminated"]
    assert (code, reason) == (75, "received SIGTERM")
    assert f"go on with resume=true run_dir={run_dir.relative_to(run_dir.parents[2])}" in printed
    assert latest_checkpoint(run_dir / "checkpoints").name == "version-000002.ckpt"


def test_75_is_an_interruption_before_the_first_checkpoint_too(runs):
    code, printed, reason, run_dir = runs["interrupted"]
    assert (code, reason) == (75, "received SIGINT")
    assert "SIGINT: finishing and saving; again = stop at once (nothing more is saved)" in printed
    assert f"go on with resume=true run_dir={run_dir.relative_to(run_dir.parents[2])}" in printed
    assert latest_checkpoint(run_dir / "checkpoints") is None


def test_128_and_the_signal_is_a_second_one_and_run_json_says_so(runs):
    code, printed, reason, _ = runs["interrupted twice"]
    assert (code, reason) == (130, "stopped at once by a second SIGINT")
    assert printed.rstrip().endswith("SIGINT again: stopped at once")
