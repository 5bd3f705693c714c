"""Which checkpoint a resume takes, what is deleted, and what a disk that is full leaves."""

import contextlib
import resource
import zipfile
from types import SimpleNamespace

import pytest
import torch

from async_rl.callbacks.checkpoint import RunCheckpoint, checkpoints, latest_checkpoint
from async_rl.checkpoint_io import CheckpointError, DurableCheckpointIO
from async_rl.durable import PARTIAL


def make(directory, version, *, complete=True):
    path = directory / f"version-{version:06d}.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", "x" * 5000)
    if not complete:
        path.write_bytes(path.read_bytes()[:2000])
    return path


def test_latest_is_the_newest_complete_one(tmp_path, caplog):
    make(tmp_path, 8)
    good = make(tmp_path, 10)
    torn = make(tmp_path, 12, complete=False)
    (tmp_path / "version-000014.ckpt.tmp").write_bytes(b"")
    assert latest_checkpoint(tmp_path) == good
    assert [r.getMessage() for r in caplog.records] == [
        f"checkpoint {torn} is skipped, for it is cut short: going on from {good.name} instead"
    ]


def test_order_is_by_version_not_by_name(tmp_path):
    for version in (1_000_000, 999_999, 3):
        make(tmp_path, version)
    assert [p.name for p in checkpoints(tmp_path)] == [
        "version-000003.ckpt",
        "version-999999.ckpt",
        "version-1000000.ckpt",
    ]


def test_without_a_complete_checkpoint_there_is_none(tmp_path, caplog):
    torn, empty = make(tmp_path, 2, complete=False), tmp_path / "version-000004.ckpt"
    empty.touch()
    assert latest_checkpoint(tmp_path) is None
    assert [r.getMessage() for r in caplog.records] == [
        f"checkpoint {empty} is skipped, for it is empty: going on from version 0 instead, as no other can be used",
        f"checkpoint {torn} is skipped, for it is cut short: going on from version 0 instead, as no other can be used",
    ]


@pytest.mark.parametrize("bad", [{"every": -1}, {"keep_last": 0}, {"every_s": 0.0}, {"timeout_s": 0}])
def test_impossible_settings_are_refused(tmp_path, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        RunCheckpoint(tmp_path, **bad)


# real files


@contextlib.contextmanager
def disk_with(free_bytes):
    """Files of this process can't grow beyond ``free_bytes``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fake_trainer(directory, version=0):
    """A trainer as far as RunCheckpoint looks at it, with real files."""
    trainer = SimpleNamespace(
        global_step=version, run_dir=directory, shutdown=SimpleNamespace(extended=contextlib.nullcontext)
    )
    trainer.save_checkpoint = lambda path, weights_only: DurableCheckpointIO().save_checkpoint(
        {"weights": torch.full((1000,), float(trainer.global_step)), "step": trainer.global_step}, path
    )
    return trainer


def save_versions(directory, *versions, keep_last=2):
    trainer, callback = fake_trainer(directory), RunCheckpoint(directory, keep_last=keep_last)
    for trainer.global_step in versions:
        callback.save(trainer)
    return [p.name for p in checkpoints(directory)]


def test_bytes_changed_in_the_middle_are_noticed(tmp_path, caplog):
    save_versions(tmp_path, 2, 4)
    newest = tmp_path / "version-000004.ckpt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert latest_checkpoint(tmp_path).name == "version-000002.ckpt"
    assert "version-000004.ckpt is skipped, for bytes of it have changed (in " in caplog.text
    assert "): going on from version-000002.ckpt instead" in caplog.text


def test_the_oldest_goes_when_a_new_one_is_complete(tmp_path):
    assert save_versions(tmp_path, 1, 2, 3, 4, keep_last=2) == ["version-000003.ckpt", "version-000004.ckpt"]


def test_a_full_disk_while_saving_keeps_the_others_and_says_so(tmp_path):
    save_versions(tmp_path, 2, 4)
    callback = RunCheckpoint(tmp_path, keep_last=1)
    with (
        disk_with(2500),
        pytest.raises(CheckpointError, match=r"version-000006.ckpt: File too large. .*version-000004.ckpt and .* kept"),
    ):
        callback.save(fake_trainer(tmp_path, 6))
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["version-000002.ckpt", "version-000004.ckpt"]
    assert torch.load(latest_checkpoint(tmp_path), weights_only=True)["step"] == 4


def test_what_a_killed_save_left_is_removed_at_the_next_start(tmp_path):
    save_versions(tmp_path, 2)
    partial = tmp_path / f"version-000004.ckpt{PARTIAL}"
    partial.write_bytes(b"half of it")
    RunCheckpoint(tmp_path).setup(fake_trainer(tmp_path), None, "fit")
    assert [p.name for p in tmp_path.iterdir()] == ["version-000002.ckpt"]


def test_a_run_that_goes_on_from_an_older_one_saves_the_newer_versions_again(tmp_path):
    save_versions(tmp_path, 2, 4, 6, keep_last=3)
    trainer, callback = fake_trainer(tmp_path, 2), RunCheckpoint(tmp_path, keep_last=2)
    callback.on_train_start(trainer, None)
    assert [p.name for p in checkpoints(tmp_path)] == ["version-000002.ckpt"]
    assert (tmp_path / "version-000006.ckpt.skipped").exists()
    for trainer.global_step in (3, 4):
        assert callback.save(trainer) is not None
    assert [p.name for p in checkpoints(tmp_path)] == ["version-000003.ckpt", "version-000004.ckpt"]


def test_a_checkpoint_is_due_after_so_many_seconds(tmp_path, monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("async_rl.callbacks.checkpoint.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    trainer, callback = fake_trainer(tmp_path), RunCheckpoint(tmp_path, every=0, keep_last=9, every_s=100.0)
    for trainer.global_step, now_s[0] in ((1, 50.0), (2, 101.0), (3, 190.0), (4, 202.0)):
        callback.on_train_batch_end(trainer, None, None, None, 0)
    assert [p.name for p in checkpoints(tmp_path)] == ["version-000002.ckpt", "version-000004.ckpt"]
