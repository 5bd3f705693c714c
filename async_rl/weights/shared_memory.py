"""SharedMemoryPublisher: the trainer's weights, copied into anonymous memory that a local engine process maps."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from async_rl.weights.buffers import Buffer, BufferedPublisher, ManifestEntry

BACKEND = "async_rl_shared_memory"
"""Name under which the engine side (:mod:`async_rl.weights.vllm_backend`) is registered with vLLM."""

HEADER = struct.Struct("<8sqq")
"""Start of every buffer: magic, version (``WRITING`` while a copy is going on), size of the buffer in bytes."""
MAGIC = b"asyncrl1"
WRITING = -1


def tensor_view(memory: mmap.mmap, entry: ManifestEntry) -> torch.Tensor:
    """A tensor over one parameter of a mapped buffer: no copy; the mapping lives as long as the tensor."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    numel = torch.Size(entry.shape).numel()
    if numel == 0:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=entry.offset).view(entry.shape)


class SharedMemoryBuffer(Buffer):
    """Memory without a name, so that nothing is left behind however the trainer dies.

    It is a memfd, which the engine opens as ``/proc/<pid>/fd/<n>``; the size of ``/dev/shm`` (64 MB in many containers)
    does not limit it. Without memfd (macOS) only engines of this process can read it.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._fd = os.memfd_create("async_rl_weights", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else -1
        if self._fd >= 0:
            os.ftruncate(self._fd, size)
        self._memory = mmap.mmap(self._fd, size)

    def view(self, entry: ManifestEntry) -> torch.Tensor:
        """The parameter's place in this buffer."""
        return tensor_view(self._memory, entry)

    def begin(self) -> None:
        """Mark the buffer as unfinished: a reader that comes now, or was too slow, sees it."""
        HEADER.pack_into(self._memory, 0, MAGIC, WRITING, self._size)

    def finish(self, version: int) -> None:
        """Mark it as holding ``version``."""
        HEADER.pack_into(self._memory, 0, MAGIC, version, self._size)

    def update_info(self, version: int, manifest: Sequence[ManifestEntry]) -> Mapping[str, Any]:
        """Path, identity, version and manifest.

        Raises:
            RuntimeError: this platform has no memory that another process can open.
        """
        if self._fd < 0:
            raise RuntimeError(
                "weights for another process need Linux (memfd_create); use the transformers engine here"
            )
        return {
            "path": f"/proc/{os.getpid()}/fd/{self._fd}",
            "inode": os.fstat(self._fd).st_ino,
            "size": self._size,
            "version": version,
            "manifest": [(e.name, e.dtype, list(e.shape), e.offset) for e in manifest],
        }

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last mapping."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SharedMemoryPublisher(BufferedPublisher):
    """Publishes to engines on the same machine, in this process or in another.

    Args:
        dtype: Wire dtype, best the engine's own: ``torch.bfloat16`` halves the bytes of float32 weights.

    Example:
        >>> publisher = SharedMemoryPublisher(torch.bfloat16)
        >>> source = publisher.publish(model.named_parameters(), version=3)
        >>> await engine.load_weights(3, source)
        >>> source.release()
    """

    backend = BACKEND

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(dtype)

    def make_buffer(self, size: int) -> SharedMemoryBuffer:
        """A new block of shared memory."""
        return SharedMemoryBuffer(size)
