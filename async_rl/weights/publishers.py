"""make_publisher: the publisher that fits an engine's weight back end."""

from __future__ import annotations

import torch

from async_rl.weights import ipc, shared_memory
from async_rl.weights.buffers import BufferedPublisher


def make_publisher(backend: str, dtype: torch.dtype, device: str | torch.device = "cuda") -> BufferedPublisher:
    """Make the trainer's end of a weight path.

    Args:
        backend: The engine's ``weight_backend``; ``"async_rl_shared_memory"`` also serves engines in this process.
        dtype: Wire dtype, best the engine's own.
        device: The GPU that trainer and engine share; used by ``"ipc"`` only.

    Raises:
        ValueError: there is no publisher for ``backend``.
    """
    if backend == shared_memory.BACKEND:
        return shared_memory.SharedMemoryPublisher(dtype)
    if backend == ipc.BACKEND:
        return ipc.IPCPublisher(dtype, device)
    raise ValueError(
        f"no publisher for the weight back end {backend!r}: there are {shared_memory.BACKEND!r}, {ipc.BACKEND!r}"
    )
