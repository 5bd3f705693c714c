"""A replay trains what a run recorded: the same losses from the same settings, and no engine anywhere."""

import json
import subprocess
import sys

import pytest
import torch
from fit_kit import Recorder, make_data, make_policy, make_trainer
from test_determinism import OddLength

from async_rl.callbacks import RLCallback
from async_rl.callbacks.checkpoint import checkpoints
from async_rl.engines.base import SamplingParams
from async_rl.engines.transformers import TransformersEngine
from async_rl.jsonl_logger import JsonlLogger
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
    live = TransformersEngine(str(tiny_model_dir), dtype="float32", threads=1)
    data = make_data(OddLength(), live, group_size=4, sampling=SamplingParams(max_tokens=6))
    trainer_for(run_dir, max_steps=5).fit(make_policy(tiny_model_dir), datamodule=data)
    return run_dir


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
    with pytest.raises(RuntimeError, match="breaks max_staleness=0"):
        trainer_for(tmp_path / "s", max_steps=5, max_staleness=0, replay=recorded).fit(policy)


def test_another_program_s_database_and_a_run_that_trained_nothing_are_refused(tiny_model_dir, tmp_path):
    (tmp_path / "run.db").write_bytes(b"no database at all, but long enough to look like a file" * 20)
    with pytest.raises(RuntimeError, match=r"run\.db"):
        trainer_for(tmp_path, replay=tmp_path).fit(make_policy(tiny_model_dir))
    empty = tmp_path / "empty"
    with pytest.raises(KeyError):
        make_trainer(empty, callbacks=[Dies()]).fit(make_policy(tiny_model_dir), datamodule=make_data())
    with pytest.raises(RuntimeError, match="records no trained batch"):
        trainer_for(tmp_path, replay=empty).fit(make_policy(tiny_model_dir))


def test_the_command_replays_without_importing_an_engine(tiny_model_dir, tmp_path, recorded):
    probe = """
import sys
from async_rl import main
code = main.main()
print("ENGINES", [m for m in sys.modules if m in ("vllm", "async_rl.engines.vllm", "async_rl.engines.transformers")])
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", probe, f"replay={recorded}", "run_dir=again", f"model.name_or_path={tiny_model_dir}",
         "max_steps=9", "run.evaluation.limit=2", "hardware.precision=32-true", "hardware.trainer_threads=1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"recorded in {recorded}" in done.stdout
    assert "ENGINES []" in done.stdout.splitlines()
    assert [row[0] for row in losses(tmp_path / "again")] == [1, 2, 3, 4, 5]
    assert losses(tmp_path / "again")[0][1:] == losses(recorded)[0][1:]
    record = json.loads((tmp_path / "again" / "run.json").read_text())
    assert (record["exit_code"], record["exit_reason"]) == (0, "all recorded batches are trained")
    assert record["evaluations"] == []
