"""S = 0 with a deterministic engine: a run killed with SIGKILL and resumed gives the losses of the undisturbed one."""

import json
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
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


def groups(run_dir):
    """Prompt and end of every group."""
    with sqlite3.connect(run_dir / "run.db") as db:
        rows = db.execute("select group_id, prompt_id, outcome, reason from groups order by group_id").fetchall()
    assert [group_id for group_id, *_ in rows] == [*range(len(rows))]
    assert len({prompt_id for _, prompt_id, *_ in rows}) == len(rows)
    return rows


def balanced(run_dir):
    """Groups by outcome, from the endings, which add up to those admitted."""
    with sqlite3.connect(run_dir / "run.db") as db:
        admitted = {i for (i,) in db.execute("select group_id from admissions")}
        endings = dict(db.execute("select group_id, outcome from endings"))
        batches = db.execute("select group_ids from batches where outcome = 'trained'").fetchall()
    counts = Counter(endings.values())
    assert endings.keys() <= admitted
    assert sorted(i for (ids,) in batches for i in json.loads(ids)) == sorted(
        i for i, outcome in endings.items() if outcome == "trained"
    )
    counts["open"] = len(admitted - endings.keys())
    assert counts["open"] <= 2  # (S + 1) * B
    assert sum(counts[o] for o in ("trained", "filtered", "failed", "dropped", "saved", "open")) == len(admitted)
    return counts


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
    balance = balanced(tmp_path)
    assert balance["trained"] + balance["open"] >= 2 * version
    ends = [outcome for _, _, outcome, _ in groups(tmp_path)]
    fourth = [i for i, outcome in enumerate(ends) if outcome == "trained"][3]
    assert {"failed", "filtered"} <= set(ends[:fourth])  # before the checkpoint of version 2 already
    one_thread(run, tiny_model_dir, tmp_path, resume=True)
    assert losses(tmp_path) == losses(undisturbed)
    assert before.items() <= losses(undisturbed).items()
    assert [*losses(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert any(norm > 0 for _, norm, _, _ in losses(tmp_path).values())
    then, now = (
        torch.load(d / "checkpoints" / "version-000006.ckpt", weights_only=True) for d in (undisturbed, tmp_path)
    )
    assert all(torch.equal(weight, now["state_dict"][name]) for name, weight in then["state_dict"].items())
    assert groups(tmp_path) == groups(undisturbed)  # none is redone, whatever became of it, and the next prompt follows
    balance = balanced(tmp_path)
    assert (balance["trained"], balance["open"]) == (12, 0)
    assert balance["filtered"] + balance["failed"] > 4
