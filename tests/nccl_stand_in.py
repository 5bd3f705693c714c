"""Stands in for NCCL where there is no GPU: a communicator of the same interface, over TCP, below vLLM's own code.

Like NCCL's it waits for ever for a peer that is gone, until it is destroyed, and then leaves garbage without an error.
"""

import contextlib
import socket
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore

STORES = []
"""Of the groups made in this process: they live as long as it does, as the trainer's end of an NCCL group."""


class Stream:
    """A CUDA stream whose work is done when it is enqueued."""

    def synchronize(self):
        pass


class Communicator:
    """``broadcast`` and ``destroy`` of vLLM's PyNcclCommunicator."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int) -> None:
        host, port = unique_id.rstrip(b"\0").decode().split()
        self.rank, self.world_size = rank, world_size
        self.disabled = False
        self._broadcasts = 0
        self._store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
        self._store.add("joined", 1)
        self._wait(lambda: self._store.add("joined", 0) == world_size)

    def broadcast(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        assert (tensor.dtype, tensor.dim()) == (torch.uint8, 1)
        if self.disabled:
            return
        data, taken = f"data-{self._broadcasts}", f"taken-{self._broadcasts}"
        self._broadcasts += 1
        if self.rank == src:
            self._store.set(data, bytes(tensor.numpy()))
            if self._wait(lambda: self._store.add(taken, 0) == self.world_size - 1):
                self._store.delete_key(data)
        elif self._wait(lambda: self._store.check([data])):
            tensor.copy_(torch.frombuffer(bytearray(self._store.get(data)), dtype=torch.uint8))
            self._store.add(taken, 1)
        else:
            tensor.fill_(0x55)

    def destroy(self) -> None:
        self.disabled = True

    def _wait(self, done) -> bool:
        while not self.disabled:
            with contextlib.suppress(RuntimeError):  # the peer that holds the store is gone: it is waited for as well
                if done():
                    return True
            time.sleep(0.001)
        return False


def new_unique_id() -> bytes:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    STORES.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    return f"127.0.0.1 {port}".encode().ljust(128, b"\0")


def install(patch) -> None:
    """Replace the communicator, and CUDA's streams and devices; ``patch`` is ``setattr`` or monkeypatch's."""
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    patch(
        nccl_common,
        "uid_init_process_group",
        lambda unique_id, rank, world, device: Communicator(unique_id, rank, world),
    )
    patch(packed_tensor, "_get_streams", lambda device, number: (Stream(),) * number)
    patch(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    patch(torch.accelerator, "current_device_index", lambda: 0)
    patch(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())


def install_in_trainer(patch, *, chunk_bytes: int, patience_s: float) -> None:
    """The same where the trainer is; small chunks and little patience."""
    from async_rl.weights import nccl, watched_group

    install(patch)
    patch(nccl, "new_unique_id", new_unique_id)
    patch(nccl, "check_device", lambda device: None)
    patch(nccl, "CHUNK_BYTES", chunk_bytes)
    patch(nccl, "PATIENCE_S", patience_s)
    patch(watched_group, "CALL_TIMEOUT_S", 0.1)
