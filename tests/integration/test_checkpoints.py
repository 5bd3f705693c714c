"""Checkpoints of real runs: damaged ones, full disks, and what a resume makes of them."""

import contextlib
import json
import resource
import sqlite3

import pytest
from fit_kit import Recorder, make_data, make_policy, make_trainer, outcomes

from async_rl.callbacks import RLCallback
from async_rl.callbacks.checkpoint import checkpoints
from async_rl.checkpoint_io import CheckpointError, flaw
from async_rl.jsonl_logger import JsonlLogger
from async_rl.orchestrator.ledger_rows import LedgerError


@contextlib.contextmanager
def files_up_to(size):
    """No file of this process can grow beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def groups_by_version(run_dir):
    with sqlite3.connect(run_dir / "run.db") as db:
        return {v: json.loads(ids) for v, ids in db.execute("select version, group_ids from batches")}


def prompts_by_group(run_dir):
    with sqlite3.connect(run_dir / "run.db") as db:
        return dict(db.execute("select group_id, prompt_id from groups"))


def test_a_damaged_checkpoint_is_skipped_and_what_came_after_the_one_before_is_trained_again(
    tiny_model_dir, tmp_path, caplog
):
    make_trainer(tmp_path, checkpoint_every=2).fit(make_policy(tiny_model_dir), datamodule=make_data())
    before = groups_by_version(tmp_path)
    newest = tmp_path / "checkpoints" / "version-000004.ckpt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 255
    newest.write_bytes(content)
    recorder, data = Recorder(), make_data()
    trainer = make_trainer(tmp_path, max_steps=6, resume=True, checkpoint_every=2, callbacks=[recorder])
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert "version-000004.ckpt is skipped" in caplog.text
    assert trainer.global_step == 6
    assert recorder.values("version_recovered") == [2]
    assert recorder.values("batch_planned") == [2, 3, 4, 5]
    assert len(data.engines[0].requests) == 2 * 2 * 2  # versions 4 and 5; 2 and 3 come from the record
    assert outcomes(tmp_path) == {"trained": 12}
    after = groups_by_version(tmp_path)
    assert {v: after[v] for v in before} == before
    assert len({i for ids in after.values() for i in ids}) == 12
    assert [p.name for p in checkpoints(newest.parent)] == ["version-000004.ckpt", "version-000006.ckpt"]
    assert not any(flaw(p) for p in checkpoints(newest.parent))


def test_a_disk_that_fills_up_while_saving_ends_the_run_and_it_goes_on_when_there_is_room(tiny_model_dir, tmp_path):
    class Fills(RLCallback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 4:
                limit.enter_context(files_up_to(2_000_000))

    with contextlib.ExitStack() as limit:
        trainer = make_trainer(tmp_path, max_steps=6, checkpoint_every=2, callbacks=[Fills()])
        with pytest.raises(CheckpointError, match=r"version-000004.ckpt: File too large.*version-000002.ckpt.*kept"):
            trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert trainer.end.exit_code == 1
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["version-000002.ckpt"]
    trainer = make_trainer(tmp_path, max_steps=6, resume=True)
    trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert (trainer.global_step, trainer.end.exit_code) == (6, 0)
    assert outcomes(tmp_path) == {"trained": 12}


def test_a_disk_full_for_the_metrics_is_a_warning_and_for_the_record_the_end(tiny_model_dir, tmp_path, caplog):
    class Fills(RLCallback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                size = (tmp_path / "metrics.jsonl").stat().st_size
                limit.enter_context(files_up_to(size))

    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    with contextlib.ExitStack() as limit:
        trainer = make_trainer(tmp_path, max_steps=6, checkpoint_every=2, callbacks=[Fills()], logger=logger)
        with pytest.raises(LedgerError, match=r"can't write the run's record .*run\.db.*committed before is kept"):
            trainer.fit(make_policy(tiny_model_dir), datamodule=make_data())
    assert trainer.end.exit_code == 1
    assert caplog.text.count("metrics.jsonl can't be written: File too large") == 1
    before, prompts = groups_by_version(tmp_path), prompts_by_group(tmp_path)
    recorder, data = Recorder(), make_data()
    trainer = make_trainer(tmp_path, max_steps=6, checkpoint_every=2, resume=True, callbacks=[recorder], logger=logger)
    trainer.fit(make_policy(tiny_model_dir), datamodule=data)
    assert (trainer.end.exit_code, trainer.global_step) == (0, 6)
    assert outcomes(tmp_path) == {"trained": 12}
    assert before.items() <= groups_by_version(tmp_path).items()  # what was recorded was trained as recorded
    assert prompts.items() <= prompts_by_group(tmp_path).items()
    assert len(set(prompts_by_group(tmp_path).values())) == 12
    asked = {int(r.request_id[1:].split("-")[0]) for r in data.engines[0].requests}
    assert asked.isdisjoint({group_id for ids in before.values() for group_id in ids})
