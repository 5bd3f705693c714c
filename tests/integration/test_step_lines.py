"""RunProgress: what its lines say of a step."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from fit_kit import make_data, make_policy, make_trainer

from async_rl.callbacks import RunProgress
from async_rl.jsonl_logger import JsonlLogger


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr("async_rl.callbacks.progress.time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def step_line(progress, capsys, waited_s):
    trainer = SimpleNamespace(
        callback_metrics={"time/wait_for_batch_s": torch.tensor(waited_s)}, global_step=1, max_steps=4, replay="run"
    )
    policy = SimpleNamespace(last_step=SimpleNamespace(updated=True, metrics={"train/ahead_s": 1.0}))
    batch = SimpleNamespace(trajectories=[SimpleNamespace(reward=0.5)], ages=lambda: [0], max_staleness=2)
    progress.on_train_batch_end(trainer, policy, None, batch, 0)
    return capsys.readouterr().out.split("  ")[-1].strip()


def test_an_evaluation_is_neither_in_the_seconds_of_a_step_nor_in_what_it_waited(clock, capsys):
    progress = RunProgress()
    progress.on_train_start(SimpleNamespace(), None)
    for waited_s in (2.0, 0.25):  # the first step as the others
        clock.s += 1.0
        progress.on_validation_start(None, None)
        clock.s += 30.0
        progress.on_validation_end(None, None)
        clock.s += 3.0
        assert step_line(progress, capsys, waited_s) == f"4.0 s (waited {waited_s:.1f} s)"


def test_waited_is_the_metric(tiny_model_dir, tmp_path, capsys):
    trainer = make_trainer(
        tmp_path, max_steps=3, eval_every=1, logger=JsonlLogger(tmp_path / "metrics.jsonl"), callbacks=[RunProgress()]
    )
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(eval_limit=2))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    waited = [f"{row['time/wait_for_batch_s']:.1f}" for row in rows if "time/wait_for_batch_s" in row]
    assert re.findall(r"^step .* \(waited (\S+) s\)$", capsys.readouterr().out, re.M) == waited
    assert len(waited) == 3
