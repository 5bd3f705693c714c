"""The engine side of shared-memory weights: a vLLM weight-transfer back end that maps a buffer and loads it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from async_rl.weights.buffers import DATA_OFFSET, ManifestEntry
from async_rl.weights.shared_memory import HEADER, MAGIC, tensor_view
from async_rl.weights.vllm_loading import LoadingEngine
from async_rl.weights.vllm_reload import WeightLoadError


@dataclass
class SharedMemoryInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand."""


@dataclass
class SharedMemoryUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What :meth:`async_rl.weights.shared_memory.SharedMemorySource.update_info` sends."""

    path: str
    inode: int
    size: int
    version: int
    manifest: list[Any]


class SharedMemoryWeightTransferEngine(LoadingEngine):
    """Loads a whole model from a mapped buffer."""

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Mappings are kept: the pages of a buffer that is used again are then already in this process's page table.
        self._mappings: dict[tuple[str, int], mmap.mmap] = {}

    def open_weights(self, info: SharedMemoryUpdateInfo) -> list[tuple[str, torch.Tensor]]:
        """Map the buffer."""
        memory = self._map(info)
        manifest = [ManifestEntry(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in info.manifest]
        _check_manifest(manifest, info.size)
        _check_header(memory, info)
        return [(entry.name, tensor_view(memory, entry)) for entry in manifest]

    def check_intact(self, info: SharedMemoryUpdateInfo) -> None:
        """The header still names the version."""
        _check_header(self._map(info), info)

    def shutdown(self) -> None:
        """Drop the mappings (tensors over them, if any are left, keep theirs)."""
        self._mappings.clear()

    def _map(self, info: SharedMemoryUpdateInfo) -> mmap.mmap:
        key = (info.path, info.inode)
        if key in self._mappings:
            return self._mappings[key]
        try:
            descriptor = os.open(info.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightLoadError(
                f"can't open the weights of version {info.version} at {info.path}: {error}"
            ) from error
        try:
            status = os.fstat(descriptor)
            if (status.st_ino, status.st_size) != (info.inode, info.size):
                raise WeightLoadError(
                    f"{info.path} is not the buffer of version {info.version} (inode {status.st_ino}, {status.st_size} "
                    f"bytes; expected {info.inode}, {info.size}): its publisher was closed"
                )
            # Copy-on-write: a mapping that torch takes as writable and that can't change what the trainer wrote.
            memory = mmap.mmap(descriptor, info.size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        self._mappings[key] = memory
        return memory


def _check_header(memory: mmap.mmap, info: SharedMemoryUpdateInfo) -> None:
    magic, version, size = HEADER.unpack_from(memory, 0)
    if (magic, version, size) != (MAGIC, info.version, info.size):
        raise WeightLoadError(
            f"the buffer should hold version {info.version} in {info.size} bytes but says version {version}, {size} "
            f"bytes{'' if magic == MAGIC else f', magic {magic!r}'}: it is being overwritten or was never finished"
        )


def _check_manifest(manifest: Iterable[ManifestEntry], size: int) -> None:
    names: set[str] = set()
    for entry in manifest:
        if entry.name in names:
            raise WeightLoadError(f"parameter {entry.name!r} is listed twice in the manifest")
        names.add(entry.name)
        if entry.offset < DATA_OFFSET or entry.offset + entry.nbytes > size:
            raise WeightLoadError(
                f"parameter {entry.name!r} {list(entry.shape)} at byte {entry.offset} lies outside the buffer, which "
                f"has {size} bytes"
            )
