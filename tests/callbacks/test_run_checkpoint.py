"""Which checkpoint a resume takes."""

import zipfile

import pytest

from async_rl.callbacks.checkpoint import RunCheckpoint, checkpoints, latest_checkpoint


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
    assert torn.name in caplog.text


def test_order_is_by_version_not_by_name(tmp_path):
    for version in (1_000_000, 999_999, 3):
        make(tmp_path, version)
    assert [p.name for p in checkpoints(tmp_path)] == [
        "version-000003.ckpt",
        "version-999999.ckpt",
        "version-1000000.ckpt",
    ]


def test_without_a_complete_checkpoint_there_is_none(tmp_path):
    make(tmp_path, 2, complete=False)
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("bad", [{"every": -1}, {"keep_last": 0}])
def test_impossible_settings_are_refused(tmp_path, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        RunCheckpoint(tmp_path, **bad)
