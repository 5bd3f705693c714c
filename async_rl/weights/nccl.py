"""NcclPublisher and NcclLink: weights copied aside on the trainer's GPU, and sent to each engine by NCCL, as vLLM does.

Nothing of vLLM is imported before a publisher is made.
"""

from __future__ import annotations

import base64
import importlib
import secrets
import warnings
from collections.abc import Mapping, Sequence
from operator import itemgetter
from threading import Lock
from typing import Any

import torch

from async_rl.weights.base import WeightLink, WeightSource
from async_rl.weights.buffers import Buffer, BufferedPublisher, BufferedSource, ManifestEntry
from async_rl.weights.ipc import CudaBuffer
from async_rl.weights.watched_group import TransferError, WatchedGroup

BACKEND = "async_rl_nccl"
"""Name under which the engine side (:mod:`async_rl.weights.nccl_backend`) is registered with vLLM."""
PATIENCE_S = 30.0
"""Longest time in which nothing arrives before either end gives a transfer up, seconds."""
CHUNK_BYTES = 256 * 2**20
"""Parameters are packed into chunks of about this size; both ends hold one (a larger parameter is a chunk alone)."""
IN_FLIGHT = 1
"""Chunks in flight. With more, the engine would load them on several CUDA streams, which don't wait for each other."""


def check_device(device: torch.device) -> None:
    """Raise ``ValueError`` where the trainer's weights can't be sent by NCCL."""
    if device.type != "cuda":
        raise ValueError(
            f"weight_transfer=nccl needs the trainer's weights on a GPU, they are on {device.type}: let them travel as "
            "files, with engine.weight_transfer=file and servers started with `python -m async_rl.serve "
            "--weight-transfer file`"
        )


class SentBuffer(CudaBuffer):
    """GPU memory that is read by a broadcast of this process, and by nobody else."""

    def update_info(self, version: int, manifest: Sequence[ManifestEntry]) -> Mapping[str, Any]:
        """What is sent, in its order, as vLLM's ``NCCLWeightTransferUpdateInfo`` lists it; and the version."""
        return {
            "version": version,
            "names": [e.name for e in manifest],
            "dtype_names": [e.dtype for e in manifest],
            "shapes": [list(e.shape) for e in manifest],
        }


class NcclSource(BufferedSource):
    """One published version (an :class:`~async_rl.weights.base.SentSource`).

    Args:
        publisher: Whose.
        buffer: Where it lies.
        version: Policy version.
        device: The GPU it lies on.
    """

    def __init__(self, publisher: BufferedPublisher, buffer: Buffer, version: int, device: torch.device) -> None:
        super().__init__(publisher, buffer, version)
        self._device = device

    def link(self, workers: int) -> WeightLink:
        """The trainer's end of a new group with an engine of so many worker processes."""
        return NcclLink(workers, self._device)


class NcclPublisher(BufferedPublisher):
    """Publishes to engines on other GPUs: each gets the weights by a broadcast of its own.

    Args:
        dtype: Wire dtype, best the engine's own.
        device: The trainer's GPU.

    Raises:
        ValueError: the trainer is not on a GPU or has no vLLM, or the dtype is not a floating-point one.
    """

    backend = BACKEND

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cuda") -> None:
        super().__init__(dtype)
        self._device = torch.device(device)
        check_device(self._device)
        try:  # now, because it takes seconds
            importlib.import_module("vllm.distributed.weight_transfer.nccl_engine")
        except ImportError as error:
            raise ValueError(
                f"weight_transfer=nccl needs vLLM where the trainer runs as well ({error}): install it, or let weights "
                "travel as files, with engine.weight_transfer=file"
            ) from error

    def make_buffer(self, size: int) -> SentBuffer:
        """A new block of GPU memory."""
        return SentBuffer(size, self._device)

    def make_source(self, buffer: Buffer, version: int) -> NcclSource:
        """The source of a version."""
        return NcclSource(self, buffer, version, self._device)


class NcclLink:
    """Rank 0 of the NCCL group with the workers of one engine (a :class:`~async_rl.weights.base.WeightLink`).

    The group's id is made here and goes to the engine with the other facts of :meth:`init_info`, over the connection
    that has the key. vLLM's own rendezvous would open a port without one, whose readers unpickle what they find there.

    Args:
        workers: Worker processes of the engine; they become the ranks 1 to ``workers``.
        device: The GPU of rank 0.
    """

    def __init__(self, workers: int, device: torch.device) -> None:
        self.name = secrets.token_hex(8)
        self._world_size = 1 + workers
        self._device_index = device.index if device.index is not None else torch.accelerator.current_device_index()
        self._unique_id = new_unique_id()
        self._lock = Lock()
        self._groups: list[WatchedGroup] = []  # at most one; empty before it is opened
        self._closed = False

    def init_info(self) -> Mapping[str, Any]:
        """What the engine needs to join."""
        return {
            "link": self.name,
            "world_size": self._world_size,
            "nccl_unique_id_b64": base64.b64encode(self._unique_id).decode("ascii"),
            "chunk_bytes": CHUNK_BYTES,
            "patience_s": PATIENCE_S,
        }

    def open(self) -> None:
        """Join the group; returns when all workers have joined.

        A worker that dies on its way into the group leaves this call waiting: NCCL can't abort what is not made yet.
        """
        from vllm.distributed.weight_transfer import nccl_common

        with torch.accelerator.device_index(self._device_index):
            group = nccl_common.uid_init_process_group(self._unique_id, 0, self._world_size, self._device_index)
        watched = WatchedGroup(group, PATIENCE_S)
        with self._lock:
            self._groups.append(watched)
            closed = self._closed
        if closed:
            watched.close()

    def send(self, source: WeightSource) -> None:
        """Broadcast a version; returns when it has left.

        Raises:
            TransferError: it was given up, or the group is not open.
        """
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        if not self._groups:
            raise TransferError("the group with the engine's workers is not open")
        warnings.filterwarnings("ignore", message="Tensor .* exceeds buffer_size_bytes")  # it is sent all the same
        group = self._groups[0]
        with torch.accelerator.device_index(self._device_index), group.transfer():
            packed_nccl_broadcast_producer(
                iterator=iter(source.tensors()),
                group=group,
                src=0,
                post_iter_func=itemgetter(1),
                buffer_size_bytes=CHUNK_BYTES,
                num_buffers=IN_FLIGHT,
            )

    def close(self) -> None:
        """Leave the group and end a :meth:`send` that waits; blocks for seconds where a worker is gone. Idempotent."""
        with self._lock:
            self._closed = True
            groups = list(self._groups)
        for group in groups:
            group.close()


def new_unique_id() -> bytes:
    """The id of a new NCCL group, which only those can join who know it."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)
