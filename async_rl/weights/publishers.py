"""Picks the publisher whose weights the engines of a run can load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from async_rl.weights.base import WeightPublisher
from async_rl.weights.shared_memory import BACKEND, SharedMemoryPublisher


class _Loads(Protocol):
    name: str
    dtype: str


def publisher_for(engines: Sequence[_Loads], model_dtype: torch.dtype) -> WeightPublisher:
    """One publisher for all engines: shared memory, or CUDA IPC where vLLM runs on a GPU.

    Args:
        engines: Started engines.
        model_dtype: What ``dtype="auto"`` of an engine means.

    Raises:
        ValueError: the engines need different back ends or number formats.
    """
    kinds = {(getattr(e, "weight_backend", BACKEND), e.dtype) for e in engines}
    if len(kinds) > 1:
        raise ValueError(
            f"engine: engines of one run must load weights the same way, got {sorted(kinds)} "
            f"for {', '.join(e.name for e in engines)}; give them the same dtype and device"
        )
    backend, dtype = kinds.pop()
    wire = model_dtype if dtype == "auto" else getattr(torch, dtype)
    if backend == BACKEND:
        return SharedMemoryPublisher(wire)
    from async_rl.weights.ipc import IPCPublisher

    return IPCPublisher(wire)
