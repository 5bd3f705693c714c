"""Weights by file: what is written, when it is removed, and what a reader refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from async_rl.weights.buffers import WeightsReplacedError
from async_rl.weights.file import BACKEND, FilePublisher, read_weights
from async_rl.weights.publishers import make_publisher


def parameters(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [("a.weight", torch.full((3, 5), value)), ("b.bias", torch.arange(7.0) * value), ("empty", torch.empty(0))]


def files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if not p.name.startswith("."))


def test_a_version_is_one_whole_file_in_the_wire_dtype_until_it_is_released(tmp_path: Path):
    publisher = make_publisher(BACKEND, torch.bfloat16, directory=tmp_path / "weights")
    source = publisher.publish(parameters(1.5), version=12)
    assert files(tmp_path / "weights") == ["version-000012.safetensors"]
    assert (source.version, source.backend) == (12, BACKEND)
    info = source.update_info()
    assert (info["version"], info["size"]) == (12, os.path.getsize(info["path"]))
    read = dict(source.tensors())
    assert {t.dtype for t in read.values()} == {torch.bfloat16}
    torch.testing.assert_close(read["a.weight"].float(), torch.full((3, 5), 1.5))
    assert read["empty"].shape == (0,)
    source.release()
    source.release()
    assert files(tmp_path / "weights") == []
    with pytest.raises(WeightsReplacedError, match="version-000012"):
        source.update_info()
    publisher.close()
    publisher.close()
    assert not (tmp_path / "weights").exists()
    with pytest.raises(RuntimeError, match="after close"):
        publisher.publish(parameters(), version=13)


def test_tied_parameters_are_written_once_and_read_under_every_name(tmp_path: Path):
    shared = torch.arange(6.0).view(2, 3)
    publisher = FilePublisher(tmp_path, torch.float32)
    source = publisher.publish([("embed", shared), ("lm_head", shared), ("norm", torch.ones(2))], version=0)
    assert os.path.getsize(source.update_info()["path"]) < 600
    read = dict(source.tensors())
    assert set(read) == {"embed", "lm_head", "norm"}
    assert read["lm_head"].data_ptr() == read["embed"].data_ptr()
    torch.testing.assert_close(read["lm_head"], shared)


def test_a_later_change_of_the_parameters_does_not_reach_a_published_version(tmp_path: Path):
    publisher = FilePublisher(tmp_path, torch.float32)
    live = parameters(1.0)
    first = publisher.publish(live, version=1)
    live[0][1].fill_(9.0)
    second = publisher.publish(live, version=2)
    assert dict(first.tensors())["a.weight"].unique().tolist() == [1.0]
    assert dict(second.tensors())["a.weight"].unique().tolist() == [9.0]


def test_a_version_published_again_has_a_file_of_its_own(tmp_path: Path):
    publisher = FilePublisher(tmp_path, torch.float32)
    first, again = publisher.publish(parameters(1.0), version=3), publisher.publish(parameters(2.0), version=3)
    first.release()
    assert dict(again.tensors())["a.weight"].unique().tolist() == [2.0]


def test_what_a_killed_run_left_is_removed_and_a_running_one_is_left_alone(tmp_path: Path):
    (tmp_path / "version-000007.safetensors").write_bytes(b"old")
    (tmp_path / "version-000008.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    publisher = FilePublisher(tmp_path, torch.float32)
    assert files(tmp_path) == ["notes.txt"]
    source = publisher.publish(parameters(), version=0)
    with pytest.raises(ValueError, match=r"engine\.weights_dir.*in use by another run"):
        FilePublisher(tmp_path, torch.float32)
    assert dict(source.tensors())
    publisher.close()
    FilePublisher(tmp_path, torch.float32).close()
    assert files(tmp_path) == ["notes.txt"]


def test_a_file_that_cannot_be_written_is_an_error_that_names_it_and_leaves_nothing(tmp_path: Path):
    publisher = FilePublisher(tmp_path, torch.float32)
    publisher.publish(parameters(), version=0).release()
    (tmp_path / "version-000001.tmp").mkdir()
    with pytest.raises(OSError, match=r"version 1 .*version-000001\.safetensors"):
        publisher.publish(parameters(), version=1)
    assert not (tmp_path / "version-000001.safetensors").exists()


def test_impossible_publications_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="needs a directory"):
        make_publisher(BACKEND, torch.float32)
    with pytest.raises(ValueError, match="floating-point"):
        FilePublisher(tmp_path, torch.int8)
    publisher = FilePublisher(tmp_path, torch.float32)
    with pytest.raises(ValueError, match="not -1"):
        publisher.publish(parameters(), version=-1)
    publisher.publish(parameters(), version=0)
    with pytest.raises(ValueError, match="same order"):
        publisher.publish(parameters()[:2], version=1)


@pytest.fixture
def backend():
    pytest.importorskip("vllm")
    from async_rl.weights import file_backend

    return file_backend


@pytest.mark.parametrize("harm", ["gone", "cut", "another version", "no safetensors"])
def test_the_engine_side_refuses_a_file_that_is_not_what_was_published(tmp_path: Path, backend, harm: str):
    publisher = FilePublisher(tmp_path, torch.float32)
    source = publisher.publish(parameters(), version=4)
    info = backend.FileUpdateInfo(**source.update_info())
    engine = backend.FileWeightTransferEngine.__new__(backend.FileWeightTransferEngine)
    assert {name for name, _ in engine.open_weights(info)} == {"a.weight", "b.bias", "empty"}
    path = Path(info.path)
    if harm == "gone":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif harm == "another version":
        publisher.publish(parameters(), version=5)
        path.write_bytes((tmp_path / "version-000005.safetensors").read_bytes())
    else:
        path.write_bytes(b"pickle" * 100)
    with pytest.raises(backend.WeightLoadError, match="version 4"):
        engine.open_weights(info)


def test_read_weights_takes_any_published_file(tmp_path: Path):
    source = FilePublisher(tmp_path, torch.float32).publish(parameters(3.0), version=1)
    assert [name for name, _ in read_weights(Path(source.update_info()["path"]))] == ["a.weight", "b.bias", "empty"]
