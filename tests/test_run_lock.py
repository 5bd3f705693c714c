"""Two processes and one run directory: the second is refused, and a lock does not outlive its process."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from async_rl.run_lock import LOCK, RunLock
from async_rl.types import SettingError

HOLDS = """
import os, subprocess, sys, time
from pathlib import Path
from async_rl.run_lock import RunLock

lock = RunLock(Path(sys.argv[1]))
if sys.argv[2] == "forks":
    begun, begins = os.pipe()
    if (child := os.fork()) == 0:
        os.write(begins, b"!")
        time.sleep(600)
    os.read(begun, 1)
elif sys.argv[2] == "executes":
    child = subprocess.Popen(["sleep", "600"], close_fds=False).pid
else:
    child = 0
print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Start a process that has the directory and a child of some kind; both are gone afterwards."""
    processes, children = [], []

    def start(kind):
        command = [sys.executable, "-c", HOLDS, str(tmp_path / "run"), kind]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        children.append(int(process.stdout.readline()))
        return process

    yield start
    for process, child in zip(processes, children, strict=True):
        process.kill()
        process.wait()
        if child:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["alone", "forks", "executes"])
def test_a_directory_is_one_process_s_until_that_is_dead_whatever_its_children_do(tmp_path, holder, kind):
    process = holder(kind)
    with pytest.raises(SettingError, match=rf"run_dir=.*/run is in use by process {process.pid} on "):
        RunLock(tmp_path / "run")
    process.kill()
    process.wait()
    RunLock(tmp_path / "run").release()


def test_two_fits_of_one_process_are_kept_apart_too_and_follow_each_other(tmp_path):
    with RunLock(tmp_path / "run") as lock, pytest.raises(SettingError, match="is in use"):
        RunLock(tmp_path / "run")
    RunLock(tmp_path / "run").release()
    lock.release()
    assert [p.name for p in (tmp_path / "run").iterdir()] == [LOCK]


@pytest.mark.parametrize("how", ["resume=true", "overwrite=true"])
def test_the_command_leaves_a_run_that_goes_on_alone(tmp_path, holder, command, trained, how):
    assert command("model=tiny", "run_dir=run")[0] == 0
    (tmp_path / "run" / "mine").write_text("kept")
    process = holder("alone")
    code, _, err = command("model=tiny", "run_dir=run", how)
    assert code == 2
    assert f"run_dir=run is in use by process {process.pid} on " in err
    assert (tmp_path / "run" / "mine").read_text() == "kept"
    assert len(trained) == 1
    process.kill()
    process.wait()
    assert command("model=tiny", "run_dir=run", how)[0] == 0
    assert (tmp_path / "run" / "mine").exists() is (how == "resume=true")
    assert command("model=tiny", "run_dir=run", how)[0] == 0  # it let go


def test_a_lock_file_that_was_taken_away_in_between_locks_nothing(tmp_path, monkeypatch):
    first, flock = RunLock(tmp_path / "run"), fcntl.flock

    def ends_first(*arguments):
        first.remove()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", ends_first)
    with pytest.raises(SettingError, match="was in use a moment ago: start again"):
        RunLock(tmp_path / "run")
    monkeypatch.undo()
    RunLock(tmp_path / "run").release()
