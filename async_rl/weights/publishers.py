"""make_publisher: the publisher that fits an engine's weight back end."""

from __future__ import annotations

from pathlib import Path

import torch

from async_rl.weights import file, ipc, nccl, shared_memory
from async_rl.weights.base import WeightPublisher


def make_publisher(
    backend: str,
    dtype: torch.dtype,
    device: str | torch.device = "cuda",
    directory: str | Path | None = None,
) -> WeightPublisher:
    """Make the trainer's end of a weight path.

    Args:
        backend: The engine's ``weight_backend``; ``"async_rl_shared_memory"`` also serves engines in this process.
        dtype: Wire dtype, best the engine's own.
        device: Where the trainer's weights are; used by ``"ipc"`` (the engine shares that GPU) and
            ``"async_rl_nccl"`` (its engines do not).
        directory: Where ``"async_rl_file"`` writes; needed by it only.

    Raises:
        ValueError: there is no publisher for ``backend``, or it needs a directory or a GPU.
    """
    if backend == shared_memory.BACKEND:
        return shared_memory.SharedMemoryPublisher(dtype)
    if backend == ipc.BACKEND:
        return ipc.IPCPublisher(dtype, device)
    if backend == nccl.BACKEND:
        return nccl.NcclPublisher(dtype, device)
    if backend == file.BACKEND:
        if directory is None:
            raise ValueError(f"the weight back end {backend!r} needs a directory that the engines can read")
        return file.FilePublisher(directory, dtype)
    raise ValueError(
        f"no publisher for the weight back end {backend!r}: there are {shared_memory.BACKEND!r}, {ipc.BACKEND!r}, "
        f"{nccl.BACKEND!r}, {file.BACKEND!r}"
    )
