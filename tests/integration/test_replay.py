"""A replay trains what a run recorded: the same losses from the same settings, and no engine anywhere."""

import json
import shutil
import sqlite3
import subprocess
import sys

import pytest
import torch
from fit_kit import Recorder, make_data, make_policy, make_trainer
from test_determinism import OddLength

from async_rl.callbacks import RLCallback, RunProgress, RunSummary
from async_rl.callbacks.checkpoint import checkpoints, latest_checkpoint
from async_rl.engines.base import SamplingParams
from async_rl.engines.transformers import TransformersEngine
from async_rl.jsonl_logger import JsonlLogger
from async_rl.orchestrator.ledger import Ledger
from async_rl.record_bounds import RecordedBounds
from async_rl.replay import RunToReplay
from async_rl.types import SettingError


class Dies(RLCallback):
    def on_batch_planned(self, trainer, policy, batch):
        raise KeyError("died")


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(r["step"], r["train/loss"], r["train/grad_norm"], r["age/mean"]) for r in rows if "train/loss" in r]


def trainer_for(run_dir, **kwargs):
    return make_trainer(run_dir, logger=JsonlLogger(run_dir / "metrics.jsonl"), **{"max_staleness": 2} | kwargs)


@pytest.fixture(scope="module")
def recorded(tiny_model_dir, tmp_path_factory):
    """A run of five steps with samples of a real model, some of them old."""
    run_dir = tmp_path_factory.mktemp("recorded")
    trainer_for(run_dir, max_steps=5).fit(make_policy(tiny_model_dir), datamodule=live_data(tiny_model_dir))
    return run_dir


@pytest.fixture(scope="module")
def narrowed(tiny_model_dir, tmp_path_factory, recorded):
    """That run, gone on with to step 6 with a bound below the ages it has recorded."""
    run_dir = tmp_path_factory.mktemp("narrowed") / "run"
    shutil.copytree(recorded, run_dir)
    trainer = trainer_for(run_dir, max_steps=6, max_staleness=0, resume=True)
    trainer.fit(make_policy(tiny_model_dir), datamodule=live_data(tiny_model_dir))
    return run_dir


def live_data(tiny_model_dir):
    live = TransformersEngine(str(tiny_model_dir), dtype="float32", threads=1)
    return make_data(OddLength(), live, group_size=4, sampling=SamplingParams(max_tokens=6))


def test_the_losses_of_a_replay_are_those_of_the_run_bit_for_bit(tiny_model_dir, tmp_path, recorded):
    recorder, policy = Recorder(), make_policy(tiny_model_dir)
    trainer = trainer_for(tmp_path, max_steps=5, replay=recorded, callbacks=[recorder])
    trainer.fit(policy)
    assert (trainer.end.exit_code, trainer.global_step) == (0, 5)
    assert losses(tmp_path) == losses(recorded)
    assert any(norm > 0 for _, _, norm, _ in losses(tmp_path))
    assert recorder.values("batch_planned") == [0, 1, 2, 3, 4]
    assert recorder.values("policy_published") == recorder.values("rollout_end") == []
    then, now = (torch.load(checkpoints(d / "checkpoints")[-1], weights_only=True) for d in (recorded, tmp_path))
    assert all(torch.equal(weight, now["state_dict"][name]) for name, weight in then["state_dict"].items())
    assert not (tmp_path / "run.db").exists()


def test_a_replay_leaves_the_run_it_reads_as_it_was(tiny_model_dir, tmp_path, recorded):
    def state():
        files = sorted(file for file in recorded.rglob("*") if file.is_file())
        return [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]

    before = state()
    trainer_for(tmp_path, max_steps=2, replay=recorded).fit(make_policy(tiny_model_dir))
    assert state() == before


def test_another_learning_rate_gives_other_losses_from_the_same_data(tiny_model_dir, tmp_path, recorded):
    trainer = trainer_for(tmp_path, max_steps=50, replay=recorded)
    trainer.fit(make_policy(tiny_model_dir, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2)))
    first, then = losses(tmp_path), losses(recorded)
    assert first[0] == then[0]
    assert first[1:] != then[1:]
    assert [row[3] for row in first] == [row[3] for row in then]  # ages
    assert (trainer.end.exit_code, trainer.end.reason) == (0, "all recorded batches are trained")


def test_max_steps_ends_a_replay(tiny_model_dir, tmp_path, recorded):
    trainer = trainer_for(tmp_path, max_steps=2, replay=recorded)
    trainer.fit(make_policy(tiny_model_dir))
    assert (trainer.global_step, losses(tmp_path)) == (2, losses(recorded)[:2])


def test_a_replay_cannot_be_resumed(tiny_model_dir, tmp_path, recorded):
    trainer_for(tmp_path, max_steps=2, replay=recorded).fit(make_policy(tiny_model_dir))
    with pytest.raises(FileNotFoundError, match="holds no record of a run"):
        trainer_for(tmp_path, resume=True).fit(make_policy(tiny_model_dir), datamodule=make_data())


def test_what_a_replay_refuses(tiny_model_dir, tmp_path, recorded):
    policy = make_policy(tiny_model_dir)
    with pytest.raises(ValueError, match="remove one"):
        trainer_for(tmp_path, replay=recorded, resume=True)
    with pytest.raises(ValueError, match="with replay it takes none"):
        trainer_for(tmp_path, replay=recorded).fit(policy, datamodule=make_data())
    with pytest.raises(ValueError, match="fit needs datamodule"):
        trainer_for(tmp_path).fit(policy)
    with pytest.raises(SettingError, match=r"no run's record \(run.db\) in .*nowhere"):
        trainer_for(tmp_path, replay=tmp_path / "nowhere").fit(policy)
    with pytest.raises(SettingError, match=r"sampled at temperature=1.0.* at temperature=0.5"):
        trainer_for(tmp_path, replay=recorded).fit(make_policy(tiny_model_dir, temperature=0.5))
    with pytest.raises(SettingError, match="holds the record of an earlier run"):
        trainer_for(recorded, replay=recorded).fit(policy)
    assert latest_checkpoint(recorded / "checkpoints").name == "version-000005.ckpt"


def test_a_replay_holds_the_bounds_of_the_record_not_its_own(tiny_model_dir, tmp_path, recorded, narrowed):
    with sqlite3.connect(narrowed / "run.db") as db:
        query = (
            "select max(b.version - g.head) from batches b, json_each(b.group_ids) e join groups g on group_id = value"
        )
        assert db.execute(query).fetchone()[0] > 0
    for name, run_dir, bounds in (
        ("a", recorded, "max_staleness 2"),
        ("b", narrowed, "max_staleness 2, 0 from version 5 on"),
    ):
        trainer = trainer_for(tmp_path / name, max_steps=6, max_staleness=0, stale_policy="wait", replay=run_dir)
        trainer.fit(make_policy(tiny_model_dir))
        assert trainer.end.exit_code == 0
        assert losses(tmp_path / name) == losses(run_dir)
        assert RunToReplay.read(run_dir).bounds.described() == bounds


def test_a_replay_masks_what_the_run_masked(tiny_model_dir, tmp_path, recorded):
    shutil.copytree(recorded, tmp_path / "masked")
    Ledger(tmp_path / "masked" / "run.db").set_meta(RecordedBounds(((0, 0, "mask"), (2, 2, "wait"))).to_meta())

    trained = []

    class Watch(RLCallback):
        def on_batch_planned(self, trainer, policy, batch):
            trained.append(sum(t.trainable_tokens for t in batch.trajectories))

    trainer = trainer_for(tmp_path / "again", max_steps=5, replay=tmp_path / "masked", callbacks=[Watch()])
    trainer.fit(make_policy(tiny_model_dir))
    first, second, *rest = trained  # all of the second batch was sampled by version 0
    assert (first > 0, second, all(n > 0 for n in rest)) == (True, 0, True)


def test_a_record_that_does_not_say_its_bound_is_replayed_as_it_is(tiny_model_dir, tmp_path, recorded):
    shutil.copytree(recorded, tmp_path / "old")
    with sqlite3.connect(tmp_path / "old" / "run.db") as db:
        assert db.execute("delete from meta where key = 'bounds'").rowcount == 1
    trainer = trainer_for(tmp_path / "again", max_steps=5, max_staleness=0, replay=tmp_path / "old")
    trainer.fit(make_policy(tiny_model_dir))
    assert losses(tmp_path / "again") == losses(recorded)


def test_the_summary_of_a_replay_leaves_out_what_nothing_generated(tiny_model_dir, tmp_path, recorded, capsys):
    summary = RunSummary()
    trainer = trainer_for(tmp_path, max_steps=3, max_staleness=0, replay=recorded, callbacks=[summary, RunProgress()])
    trainer.fit(make_policy(tiny_model_dir))
    printed = capsys.readouterr().out
    for absent in ("generated", "tokens/s", "overlap", "admission", "running", "starting the engine"):
        assert absent not in printed
    assert "3 of 5 recorded batches" in printed
    assert summary.figures["age_bound"] == 2
    assert "tokens_per_s" not in summary.figures


def test_another_program_s_database_and_a_run_that_trained_nothing_are_refused(tiny_model_dir, tmp_path):
    (tmp_path / "run.db").write_bytes(b"no database at all, but long enough to look like a file" * 20)
    with pytest.raises(RuntimeError, match=r"run\.db"):
        trainer_for(tmp_path, replay=tmp_path).fit(make_policy(tiny_model_dir))
    empty = tmp_path / "empty"
    with pytest.raises(KeyError):
        make_trainer(empty, callbacks=[Dies()]).fit(make_policy(tiny_model_dir), datamodule=make_data())
    with pytest.raises(RuntimeError, match="records no trained batch"):
        trainer_for(tmp_path, replay=empty).fit(make_policy(tiny_model_dir))


def test_the_command_replays_without_importing_an_engine(tiny_model_dir, tmp_path, narrowed):
    probe = """
import sys
from async_rl import main
code = main.main()
print("ENGINES", [m for m in sys.modules if m in ("vllm", "async_rl.engines.vllm", "async_rl.engines.transformers")])
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", probe, f"replay={narrowed}", "run_dir=again", f"model.name_or_path={tiny_model_dir}",
         "max_steps=9", "max_staleness=0",
         "run.evaluation.limit=2", "hardware.precision=32-true", "hardware.trainer_threads=1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"recorded in {narrowed}" in done.stdout
    assert "changed: max_staleness" not in done.stdout
    assert "6 of 6 recorded batches of 2 x 4 rollouts, max_staleness 2, 0 from version 5 on" in done.stdout
    assert "ENGINES []" in done.stdout.splitlines()
    assert [row[0] for row in losses(tmp_path / "again")] == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "again")[0][1:] == losses(narrowed)[0][1:]
    record = json.loads((tmp_path / "again" / "run.json").read_text())
    assert (record["exit_code"], record["exit_reason"]) == (0, "all recorded batches are trained")
    assert record["evaluations"] == []
