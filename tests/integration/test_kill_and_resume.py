"""S = 0 with a deterministic engine: a run killed with SIGKILL and resumed gives the losses of the undisturbed one."""

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repeatable_run import run

SCRIPT = Path(__file__).parent / "repeatable_run.py"


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed")
    one_thread(run, tiny_model_dir, run_dir)
    return run_dir


def one_thread(function, *args, **kwargs):
    """Sums are added in the order the threads take them, so their number has to be that of the killed process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return function(*args, **kwargs)
    finally:
        torch.set_num_threads(threads)


def losses(run_dir):
    """What each version was trained with; of versions trained again the last."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    keys = ("train/loss", "train/grad_norm", "train/lr", "train/reward_mean")
    return {r["step"]: tuple(r[k] for k in keys) for r in rows if "train/loss" in r}


@pytest.mark.parametrize(("version", "where"), [(3, "step"), (4, "rollouts")])
def test_a_killed_and_resumed_run_gives_the_losses_of_the_undisturbed_one(
    tiny_model_dir, tmp_path, undisturbed, version, where
):
    killed = subprocess.run(
        [sys.executable, str(SCRIPT), str(tiny_model_dir), str(tmp_path), str(version), where],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = losses(tmp_path)
    assert max(before) == version
    one_thread(run, tiny_model_dir, tmp_path, resume=True)
    assert losses(tmp_path) == losses(undisturbed)
    assert before.items() <= losses(undisturbed).items()
    assert [*losses(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert any(norm > 0 for _, norm, _, _ in losses(tmp_path).values())
    then, now = (
        torch.load(d / "checkpoints" / "version-000006.ckpt", weights_only=True) for d in (undisturbed, tmp_path)
    )
    assert all(torch.equal(weight, now["state_dict"][name]) for name, weight in then["state_dict"].items())
    with sqlite3.connect(tmp_path / "run.db") as db:
        assert dict(db.execute("select outcome, count(*) from groups group by 1")) == {"trained": 12}
        (prompts,) = db.execute("select count(distinct prompt_id) from groups").fetchone()
    assert prompts == 12
