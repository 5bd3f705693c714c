"""`segment` and `trajectory` in whole runs: the difference is in the stamps, and the metrics show it."""

import json

import pytest
from fit_kit import engine, make_data, make_policy, make_trainer

from async_rl.callbacks import RLCallback
from async_rl.jsonl_logger import JsonlLogger


class Trained(RLCallback):
    def __init__(self):
        self.trajectories = []

    def on_rollout_end(self, trainer, policy, group):
        self.trajectories += group.trajectories


@pytest.mark.parametrize("policy", ["segment", "trajectory"])
def test_versions_per_trajectory_are_in_stamps_and_metrics(tiny_model_dir, tmp_path, policy):
    seen, metrics = Trained(), tmp_path / "metrics.jsonl"
    trainer = make_trainer(
        tmp_path, max_steps=8, max_staleness=3, sampling_policy=policy, callbacks=[seen], logger=JsonlLogger(metrics)
    )
    slow = engine(latency_s=lambda prompt, seed: 0.05 + 0.1 * (seed % 5))
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data(with_engine=slow))
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    finished = sum(row.get("rollout/finished", 0) for row in rows)
    mixed = sum(row.get("rollout/mixed_share", 0) * row.get("rollout/finished", 0) for row in rows)
    segments = sum(row.get("rollout/segments_mean", 0) * row.get("rollout/finished", 0) for row in rows)
    stamped = [{s.version for s in t.segments} for t in seen.trajectories]
    assert finished == pytest.approx(len(stamped)) == 32
    assert mixed == pytest.approx(sum(len(versions) > 1 for versions in stamped))
    assert segments == pytest.approx(sum(len(t.segments) for t in seen.trajectories))
    if policy == "trajectory":
        assert (mixed, segments) == (0, finished)
    else:
        assert mixed > 0
        assert segments > finished
