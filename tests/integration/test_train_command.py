"""``python train.py`` as a user runs it: a real vLLM, a real (tiny) model, a process of its own."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.vllm


def command(run_dir, *overrides):
    return [
        sys.executable, "train.py", "model=tiny", f"run_dir={run_dir}", "batch_size=2", "group_size=4",
        "run.evaluation.limit=6", "engine.kv_cache_gib=0.25", *overrides,
    ]  # fmt: skip


def train(run_dir, *overrides):
    done = subprocess.run(command(run_dir, *overrides), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout, json.loads((run_dir / "run.json").read_text())


def children_of(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(p) for p in listed.stdout.split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_and_its_resume(tmp_path):
    run_dir = tmp_path / "run"
    printed, record = train(run_dir, "max_steps=4", "max_staleness=2", "run.checkpoint_every=2")
    assert record["exit_code"] == 0
    assert [e["version"] for e in record["evaluations"]] == [0, 4]
    assert record["summary"]["age_max"] <= 2
    assert {"steps", "evaluation, end", "run directory", "overlap"} <= {
        line.split("│")[1].strip() for line in printed.splitlines() if line.count("│") > 2
    }
    log = (run_dir / "run.log").read_text()
    assert "serves the weights of version 0" in log
    assert "serves the weights of version 1" in log  # compared again after the first update
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "train/loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4]
    assert abs(steps[0]["ratio/mean"] - 1) < 0.05  # age 0: the engine samples with our weights
    assert steps[0]["ratio/mismatch_age0"] < 0.05
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["version-000002.ckpt", "version-000004.ckpt"]
    assert list((run_dir / "tensorboard").glob("events*"))

    _, record = train(run_dir, "max_steps=6", "max_staleness=2", "resume=true")
    assert (record["summary"]["steps"], record["summary"]["version"]) == (2, 6)
    assert record["summary"]["eval_end_version"] == 6
    assert "eval_start" not in record["summary"]
    with sqlite3.connect(run_dir / "run.db") as db:
        assert dict(db.execute("select outcome, count(*) from groups group by 1")) == {"trained": 12}


@pytest.mark.slow
def test_two_runs_at_once_do_not_collide(tmp_path):
    runs = {
        tmp_path / name: subprocess.Popen(
            command(tmp_path / name, "engine=vllm", "max_steps=2", f"optimizer.lr={lr}"), cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for name, lr in {"one": 1e-3, "other": 1e-2}.items()
    }  # fmt: skip
    printed = {run_dir: process.communicate(timeout=300)[0] for run_dir, process in runs.items()}
    for run_dir, process in runs.items():
        assert process.returncode == 0, printed[run_dir][-3000:]
        assert json.loads((run_dir / "run.json").read_text())["exit_reason"] == "max_steps=2 reached"
        with sqlite3.connect(run_dir / "run.db") as db:
            assert db.execute("select outcome, count(*) from groups group by 1").fetchall() == [("trained", 4)]
        assert "serves the weights of version 1" in (run_dir / "run.log").read_text()  # its own, not the other's


def test_sigkill_leaves_no_engine_behind(tmp_path):
    process = subprocess.Popen(
        command(tmp_path / "run", "max_steps=100000"), cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("step "):  # the header has a line of "steps"
            break
    engines = [pid for pid in children_of(process.pid) if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert engines
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    deadline_s = time.monotonic() + 60
    while any(map(alive, engines)) and time.monotonic() < deadline_s:
        os.sched_yield()
    assert not any(map(alive, engines))
