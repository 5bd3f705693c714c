"""Runs that are hit at random moments and resumed; and that the checks behind it see what is wrong."""

import json
import sqlite3
import subprocess
import sys

import pytest
import torch
from fit_kit import make_data, make_policy, make_trainer

from async_rl.compose import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "chaos.py"


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import chaos_check

    return chaos_check


@pytest.fixture(scope="module")
def finished(tiny_model_dir, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("finished")
    make_trainer(run_dir, max_steps=3).fit(make_policy(tiny_model_dir), datamodule=make_data())
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path):
    with sqlite3.connect(finished / "run.db") as source, sqlite3.connect(tmp_path / "run.db") as copy:
        source.backup(copy)
    (tmp_path / "checkpoints").mkdir()
    for path in (finished / "checkpoints").iterdir():
        (tmp_path / "checkpoints" / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(run_dir, statement):
    with sqlite3.connect(run_dir / "run.db") as db:
        assert db.execute(statement).rowcount == 1


def test_four_faults_lose_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seed", "3", "--faults", "4", "--json", tmp_path / "chaos.json"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads((tmp_path / "chaos.json").read_text())
    assert found["faults"] == 4
    assert (found["lost"], found["duplicated"], found["orphans"]) == (0, 0, 0)
    assert found["equal_to_undisturbed"]
    assert found["max_exit_s"] < 30
    assert found["groups"].keys() == {"trained"}
    assert sum(found["environment_faults"].values()) > 0


def test_a_sound_run_has_no_problems(check, run_dir):
    record = check.RunRecord.read(run_dir)
    assert check.problems(record, max_steps=3, max_staleness=2) == []
    assert record.lost(record) == record.duplicated() == []
    assert check.checkpoint(run_dir, 3)[0] == []
    assert (record.admitted, len(record.trained), record.open) == (6, 6, 0)


@pytest.mark.parametrize(
    ("statement", "complaint"),
    [
        ("DELETE FROM endings WHERE group_id = 3", "1 of 6 admitted groups have no outcome"),
        ("UPDATE batches SET outcome = 'dropped' WHERE version = 1", "6 groups ended as trained, but 4"),
        ("UPDATE batches SET version = 7 WHERE version = 1", "versions trained: [0, 7, 2]"),
        ("UPDATE keeps SET head = -1 WHERE group_id = 5", "with max_staleness=2"),
    ],
)
def test_a_record_that_breaks_a_promise_is_seen(check, run_dir, statement, complaint):
    edit(run_dir, statement)
    (problem, *_) = check.problems(check.RunRecord.read(run_dir), max_steps=3, max_staleness=2)
    assert complaint in problem


def test_what_is_lost_and_what_is_trained_twice_is_counted(check, run_dir):
    undisturbed = check.RunRecord.read(run_dir)
    first, second = undisturbed.trained[:2]
    edit(run_dir, f"UPDATE batches SET group_ids = '[{first}, {first}]' WHERE version = 0")
    record = check.RunRecord.read(run_dir)
    assert record.lost(undisturbed) == [undisturbed.prompts[second]]
    assert record.duplicated() == [undisturbed.prompts[first]]
    assert record.prompt_batches != undisturbed.prompt_batches


def test_a_checkpoint_that_is_not_at_its_version_is_seen(check, run_dir):
    path = run_dir / "checkpoints" / "version-000003.ckpt"
    state = torch.load(path, weights_only=True)
    weights = dict(state["state_dict"])
    for s in state["optimizer_states"][0]["state"].values():
        s["step"] += 1
    name, weight = next(iter(weights.items()))
    state["state_dict"][name] = weight + 1e-3
    torch.save(state, path)
    (run_dir / "checkpoints" / "version-000004.ckpt.tmp").touch()
    found, changed = check.checkpoint(run_dir, 3)
    assert found == [
        "checkpoint of version 3: optimizer steps {4}, not {3}", "left behind: checkpoints/version-000004.ckpt.tmp"
    ]  # fmt: skip
    assert not check.same_weights(weights, changed)
    path.unlink()
    assert "no version-000003.ckpt" in check.checkpoint(run_dir, 3)[0][0]


def test_a_process_that_stays_is_found_by_its_marker(check, monkeypatch):
    monkeypatch.setenv(check.MARKER, "life-1")
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert check.processes_of("life-1") == [process.pid]
        assert check.processes_of("life-1", "EngineCore") == check.processes_of("life-2") == []
        process.kill()
        process.wait()
        assert check.processes_of("life-1") == []


def test_what_a_run_leaves_in_the_temporary_directory_is_seen(check, tmp_path):
    assert check.left_over(tmp_path, check.shared_memory()) == []
    (tmp_path / "async-rl-1").mkdir()
    assert check.left_over(tmp_path, check.shared_memory()) == [str(tmp_path / "async-rl-1")]
