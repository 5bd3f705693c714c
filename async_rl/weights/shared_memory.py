"""SharedMemoryPublisher: the trainer's weights, copied into anonymous memory that a local engine process maps."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

BACKEND = "async_rl_shared_memory"
"""Name under which the engine side (:mod:`async_rl.weights.vllm_backend`) is registered with vLLM."""

HEADER = struct.Struct("<8sqq")
"""Start of every buffer: magic, version (``WRITING`` while a copy is going on), payload bytes."""
MAGIC = b"asyncrl1"
WRITING = -1
DATA_OFFSET = 4096
ALIGNMENT = 64


class WeightsReplacedError(RuntimeError):
    """A source was read after its buffer had been given to a newer version."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """Where one parameter lies in a buffer.

    Attributes:
        name: Hugging Face name of the parameter.
        dtype: Name of its dtype in the buffer, for example ``"bfloat16"``.
        shape: Its shape.
        offset: Bytes from the start of the buffer. Tied parameters share one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the parameter in the buffer, bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.Size(self.shape).numel() * dtype.itemsize


def tensor_view(memory: mmap.mmap, entry: ManifestEntry) -> torch.Tensor:
    """A tensor over one parameter of a mapped buffer: no copy; the mapping lives as long as the tensor."""
    numel = torch.Size(entry.shape).numel()
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if numel == 0:
        return torch.empty(entry.shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch warns that a tensor over read-only memory must not be written; nobody here writes it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=entry.offset).view(entry.shape)


class _Buffer:
    """One block of anonymous memory that holds one version at a time, with who may overwrite it."""

    def __init__(self, size: int, name: str) -> None:
        self.size = size
        # A memfd has no name: nothing is left behind however the trainer dies, and the size of /dev/shm does not limit
        # it. The engine opens it as /proc/<pid>/fd/<n>. Without memfd (macOS) only engines of this process can read.
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else -1
        if self.fd >= 0:
            os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        self.version: int | None = None
        self.readers = 0  # sources that were handed out, read and not yet released

    def write_header(self, version: int) -> None:
        HEADER.pack_into(self.memory, 0, MAGIC, version, self.size)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class SharedMemorySource:
    """One published version in shared memory (a :class:`~async_rl.weights.base.WeightSource`)."""

    backend = BACKEND

    def __init__(self, publisher: SharedMemoryPublisher, buffer: _Buffer, version: int) -> None:
        self._publisher = publisher
        self._buffer = buffer
        self._reading = False
        self._released = False
        self.version = version

    def _acquire(self) -> None:
        with self._publisher.lock:
            if self._released or self._buffer.version != self.version:
                raise WeightsReplacedError(
                    f"policy version {self.version} is no longer in shared memory (this buffer now holds "
                    f"{self._buffer.version}): load the newest published version, and read a source before releasing it"
                )
            if not self._reading:
                self._reading = True
                self._buffer.readers += 1

    def update_info(self) -> Mapping[str, Any]:
        """Path, identity, version and manifest, for the engine process.

        Raises:
            WeightsReplacedError: the buffer was reused or the source released.
            RuntimeError: this platform has no memory that another process can open.
        """
        self._acquire()
        if self._buffer.fd < 0:
            raise RuntimeError(
                "shared-memory weights for another process need Linux (memfd_create); use the transformers engine here"
            )
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._buffer.fd}",
            "inode": os.fstat(self._buffer.fd).st_ino,
            "size": self._buffer.size,
            "version": self.version,
            "manifest": [(e.name, e.dtype, list(e.shape), e.offset) for e in self._publisher.manifest],
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, in the wire dtype; views that must not be written."""
        self._acquire()
        for entry in self._publisher.manifest:
            yield entry.name, tensor_view(self._buffer.memory, entry)

    def release(self) -> None:
        """Give the buffer back. Idempotent."""
        with self._publisher.lock:
            if self._reading and not self._released:
                self._buffer.readers -= 1
            self._released = True


class SharedMemoryPublisher:
    """Copies named parameters into shared memory, in the engine's dtype (a ``WeightPublisher``).

    ``publish`` never waits for a load: it writes to a buffer that nobody reads, and adds one when there is none. The
    newest version stays readable until a newer one has been published twice over, older unread ones are replaced.
    Buffers that are being read are never touched. Two buffers are the usual number.

    Args:
        dtype: Wire dtype, best the engine's own: ``torch.bfloat16`` halves the bytes of float32 weights.

    Example:
        >>> publisher = SharedMemoryPublisher(torch.bfloat16)
        >>> source = publisher.publish(model.named_parameters(), version=3)
        >>> await engine.load_weights(3, source)
        >>> source.release()
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"the wire dtype must be a floating-point dtype, not {dtype}")
        self.lock = threading.Lock()
        self.dtype = dtype
        self.manifest: tuple[ManifestEntry, ...] = ()
        self._size = 0
        self._buffers: list[_Buffer] = []
        self._newest: _Buffer | None = None
        self._closed = False

    def publish(self, parameters: Iterable[tuple[str, torch.Tensor]], version: int) -> SharedMemorySource:
        """Copy ``parameters`` and return the source of ``version``. Blocks for the copy only.

        Args:
            parameters: Name and tensor of every parameter, on any device, in the same order every time. Names that
                share one tensor (tied weights) are written once.
            version: Policy version, >= 0.

        Raises:
            ValueError: a name, shape or the order differs from the first call, or the version is negative.
            RuntimeError: the publisher is closed.
        """
        if self._closed:
            raise RuntimeError(f"publish of version {version} after close: make a new SharedMemoryPublisher")
        if version < 0:
            raise ValueError(f"a policy version is >= 0, not {version}")
        named = [(name, tensor.detach()) for name, tensor in parameters]
        if not self.manifest:
            self.manifest, self._size = _layout(named, self.dtype)
        _check_same(self.manifest, named)
        buffer = self._take_buffer()
        buffer.write_header(WRITING)
        written: set[int] = set()
        for entry, (_, tensor) in zip(self.manifest, named, strict=True):
            if entry.offset not in written:
                written.add(entry.offset)
                tensor_view(buffer.memory, entry).copy_(tensor)
        buffer.write_header(version)
        with self.lock:
            buffer.version = version
            self._newest = buffer
        return SharedMemorySource(self, buffer, version)

    def _take_buffer(self) -> _Buffer:
        with self.lock:
            idle = [b for b in self._buffers if b.readers == 0 and b is not self._newest]
            buffer = idle[0] if idle else _Buffer(self._size, f"async_rl_weights_{os.getpid()}")
            if not idle:
                self._buffers.append(buffer)
            buffer.version = None
            return buffer

    def close(self) -> None:
        """Free the memory. Sources handed out can't be read by another process any more. Idempotent."""
        with self.lock:
            if not self._closed:
                self._closed = True
                for buffer in self._buffers:
                    buffer.version = None
                    buffer.close()
                self._buffers.clear()
                self._newest = None


def _layout(named: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype) -> tuple[tuple[ManifestEntry, ...], int]:
    """Place every distinct tensor at an aligned offset; names of one tensor get one place."""
    if not named:
        raise ValueError("there is no parameter to publish: pass module.named_parameters()")
    places: dict[tuple[Any, ...], int] = {}
    entries = []
    end = DATA_OFFSET
    wire = str(dtype).removeprefix("torch.")
    for name, tensor in named:
        identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        key = identity if tensor.numel() else (name,)
        if key not in places:
            places[key] = end
            end += -(-tensor.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        entries.append(ManifestEntry(name, wire, tuple(tensor.shape), places[key]))
    return tuple(entries), end


def _check_same(manifest: Sequence[ManifestEntry], named: Sequence[tuple[str, torch.Tensor]]) -> None:
    was = {e.name: e.shape for e in manifest}
    now = {name: tuple(tensor.shape) for name, tensor in named}
    if [e.name for e in manifest] != [name for name, _ in named] or was != now:
        changed = sorted(k for k in was.keys() | now.keys() if was.get(k) != now.get(k))
        detail = (
            f"{changed[0]!r} was {was.get(changed[0])}, is {now.get(changed[0])}" if changed else "the order differs"
        )
        raise ValueError(f"the parameters must be those of the first publish: {detail}")
