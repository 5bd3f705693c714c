"""Publishing: what is written, which buffers may be overwritten, and that nothing is left behind."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.weights.buffers import DATA_OFFSET, WeightsReplacedError, layout
from async_rl.weights.publishers import make_publisher
from async_rl.weights.shared_memory import BACKEND, HEADER, MAGIC, WRITING, SharedMemoryPublisher


def parameters(value: float = 1.0, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    return [("a.weight", torch.full((3, 5), value, dtype=dtype)), ("b.bias", torch.arange(7, dtype=dtype) * value)]


def mapped(info) -> mmap.mmap:
    descriptor = os.open(info["path"], os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, info["size"], access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)


def test_tensors_are_the_published_values_in_the_wire_dtype():
    publisher = SharedMemoryPublisher(torch.bfloat16)
    source = publisher.publish(parameters(1.5), version=4)
    read = dict(source.tensors())
    assert source.version == 4
    assert {name: t.dtype for name, t in read.items()} == {"a.weight": torch.bfloat16, "b.bias": torch.bfloat16}
    torch.testing.assert_close(read["a.weight"].float(), torch.full((3, 5), 1.5))
    torch.testing.assert_close(read["b.bias"].float(), (torch.arange(7) * 1.5).bfloat16().float())
    publisher.close()


def test_another_opening_of_the_path_sees_header_and_bytes():
    publisher = SharedMemoryPublisher(torch.float32)
    info = publisher.publish(parameters(2.0), version=9).update_info()
    memory = mapped(info)
    assert HEADER.unpack_from(memory, 0) == (MAGIC, 9, info["size"])
    name, dtype, shape, offset = info["manifest"][0]
    assert (name, dtype, shape) == ("a.weight", "float32", [3, 5])
    assert torch.frombuffer(bytearray(memory[offset : offset + 60]), dtype=torch.float32).tolist() == [2.0] * 15
    publisher.close()


def test_a_later_change_of_the_parameters_does_not_reach_a_published_version():
    publisher = SharedMemoryPublisher(torch.float32)
    live = parameters(1.0)
    source = publisher.publish(live, version=0)
    live[0][1].fill_(100.0)
    assert dict(source.tensors())["a.weight"].unique().tolist() == [1.0]
    publisher.close()


def test_tied_weights_are_written_once_and_read_under_both_names():
    publisher = SharedMemoryPublisher(torch.float32)
    shared = torch.nn.Parameter(torch.randn(40, 8))
    source = publisher.publish([("embed.weight", shared), ("head.weight", shared), ("x", torch.ones(1))], version=0)
    entries = {e.name: e for e in publisher.manifest}
    assert entries["embed.weight"].offset == entries["head.weight"].offset != entries["x"].offset
    read = dict(source.tensors())
    assert torch.equal(read["head.weight"], shared)
    assert torch.equal(read["embed.weight"], shared)
    publisher.close()


def test_publishing_never_waits_for_a_reader_and_never_touches_what_it_reads():
    publisher = SharedMemoryPublisher(torch.float32)
    first = publisher.publish(parameters(1.0), 1)
    being_read = dict(first.tensors())
    for version in range(2, 7):  # a load of version 1 is going on all the while
        publisher.publish(parameters(float(version)), version)
    assert being_read["a.weight"].unique().tolist() == [1.0]
    assert len(publisher._buffers) == 3  # the one being read and two that take turns
    first.release()
    publisher.close()


def test_a_version_nobody_reads_gives_way_to_newer_ones_and_says_so():
    publisher = SharedMemoryPublisher(torch.float32)
    old = publisher.publish(parameters(1.0), 1)
    publisher.publish(parameters(2.0), 2)
    newest = publisher.publish(parameters(3.0), 3)
    with pytest.raises(WeightsReplacedError, match="version 1"):
        old.update_info()
    assert dict(newest.tensors())["a.weight"].unique().tolist() == [3.0]
    assert len(publisher._buffers) == 2
    publisher.close()


def test_a_reserved_version_can_be_read_however_many_come_before_that_begins():
    publisher = SharedMemoryPublisher(torch.float32)
    chosen = publisher.publish(parameters(1.0), 1)
    chosen.reserve()
    for version in range(2, 5):
        publisher.publish(parameters(float(version)), version)
    assert dict(chosen.tensors())["a.weight"].unique().tolist() == [1.0]
    assert len(publisher._buffers) == 3
    chosen.release()
    assert [b.readers for b in publisher._buffers] == [0, 0, 0]
    publisher.close()


def test_a_released_source_cannot_be_read_and_release_twice_counts_once():
    publisher = SharedMemoryPublisher(torch.float32)
    source, other = publisher.publish(parameters(), 0), publisher.publish(parameters(), 1)
    other.update_info()
    source.update_info()
    source.release()
    source.release()
    assert [b.readers for b in publisher._buffers] == [0, 1]
    with pytest.raises(WeightsReplacedError):
        source.update_info()
    publisher.close()


def test_the_header_says_unfinished_while_a_copy_is_going_on():
    publisher = SharedMemoryPublisher(torch.float32)
    publisher.publish(parameters(), 0)
    publisher.publish(parameters(), 1)
    reader = mapped(publisher.publish(parameters(), 2).update_info())  # keeps its buffer
    publisher.publish(parameters(), 3)
    buffer = publisher._spare_buffer()
    buffer.begin()
    info = buffer.update_info(3, publisher.manifest)
    assert HEADER.unpack_from(mapped(info), 0)[1] == WRITING
    assert HEADER.unpack_from(reader, 0)[1] == 2
    publisher.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ([("a.weight", torch.ones(3, 5))], "2 were there, now 1"),
        ([("a.weight", torch.ones(3, 5)), ("c", torch.ones(7))], "'b.bias'.*'c'"),
        ([("a.weight", torch.ones(5, 3)), ("b.bias", torch.ones(7))], r"\(3, 5\).*\(5, 3\)"),
    ],
)
def test_other_parameters_than_the_first_time_are_refused(changed, message):
    publisher = SharedMemoryPublisher(torch.float32)
    publisher.publish(parameters(), 0)
    with pytest.raises(ValueError, match=message):
        publisher.publish(changed, 1)
    publisher.close()


def test_closed_negative_and_empty_are_refused():
    publisher = SharedMemoryPublisher()
    with pytest.raises(ValueError, match="no parameter"):
        publisher.publish([], 0)
    with pytest.raises(ValueError, match=">= 0"):
        publisher.publish(parameters(), -1)
    with pytest.raises(ValueError, match="floating"):
        SharedMemoryPublisher(torch.int8)
    publisher.close()
    publisher.close()
    with pytest.raises(RuntimeError, match="after close"):
        publisher.publish(parameters(), 0)
    with pytest.raises(ValueError, match="no publisher"):
        make_publisher("nccl", torch.float32)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20), st.sampled_from([torch.bfloat16, torch.float32]))
def test_places_do_not_overlap(sizes, dtype):
    manifest, size = layout([(f"p{i}", torch.empty(n)) for i, n in enumerate(sizes)], dtype)
    end = DATA_OFFSET
    for entry, n in zip(manifest, sizes, strict=True):
        assert entry.offset >= end
        assert entry.offset % 64 == 0
        end = entry.offset + n * dtype.itemsize
    assert end <= size


def test_sigkill_leaves_no_shared_memory(tmp_path: Path):
    script = tmp_path / "publish.py"
    script.write_text(
        textwrap.dedent(
            """
            import time, torch
            from async_rl.weights.shared_memory import SharedMemoryPublisher
            publisher = SharedMemoryPublisher(torch.float32)
            source = publisher.publish([("w", torch.ones(1_000_000))], 0)
            print(source.update_info()["path"], flush=True)
            time.sleep(60)
            """
        )
    )
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    path = process.stdout.readline().strip()
    assert os.stat(path).st_size > 4_000_000  # readable by another process while it lives
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    deadline = time.monotonic() + 60
    while os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(path)
    assert (set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()) <= before


def test_the_factory_makes_what_the_backend_needs():
    publisher = make_publisher(BACKEND, torch.float16)
    assert isinstance(publisher, SharedMemoryPublisher)
    assert publisher.dtype == torch.float16
    publisher.close()
