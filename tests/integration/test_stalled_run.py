"""A real process that stalls: it says where, and ends."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "stalled_run.py"


@pytest.mark.parametrize("where", ["environment", "callback"])
def test_a_stalled_run_reports_and_exits_with_1(tiny_model_dir, tmp_path, where):
    command = [sys.executable, str(SCRIPT), str(tiny_model_dir), str(tmp_path), where]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().strip() == "stalling"
        _, errors = process.communicate(timeout=90)  # stall_timeout_s=1.5, and a main thread that does not come has 3 s
    finally:
        process.kill()
    assert process.returncode == 1
    report = (tmp_path / "stall.txt").read_text()
    for expected in (
        "no batch was trained, no rollout ended and no newer weights were loaded",
        "(stall_timeout_s=1.5)",
        "in a_tool_that_hangs",
        "trained_version: ",
        "running: ",
        "limited_by: ",
        "planner: ",
        "thread MainThread",
        "asyncio tasks in thread rollout-",
    ):
        assert expected in report
    if where == "environment":
        assert "MainThread: waits for a batch, for " in report
        assert "StallError" in errors
    else:
        assert "MainThread: waits" not in report
        assert "the process would not end: MainThread is in a_tool_that_hangs" in errors
