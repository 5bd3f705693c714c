"""IPCPublisher: the trainer's weights, copied aside on the GPU and handed to vLLM's own CUDA IPC back end."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions

from async_rl.weights.buffers import Buffer, BufferedPublisher, ManifestEntry

BACKEND = "ipc"
"""vLLM's name of the back end (``vllm.distributed.weight_transfer.ipc_engine``)."""


class CudaBuffer(Buffer):
    """One block of GPU memory; parameters are views of it, so the engine opens one allocation per version.

    Args:
        size: Bytes.
        device: Where the trainer's weights are; the engine must be on the same GPU.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)

    def view(self, entry: ManifestEntry) -> torch.Tensor:
        """The parameter's place in this buffer."""
        raw = self._memory[entry.offset : entry.offset + entry.nbytes]
        return raw.view(getattr(torch, entry.dtype)).view(entry.shape)

    def begin(self) -> None:
        """Nothing to mark: readers are counted by the publisher."""

    def finish(self, version: int) -> None:
        """Wait for the copy, which another process can't do through a stream of this one."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def update_info(self, version: int, manifest: Sequence[ManifestEntry]) -> Mapping[str, Any]:
        """Names, dtypes, shapes and IPC handles, as vLLM's ``IPCWeightTransferUpdateInfo`` takes them."""
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        reduce: Callable[[torch.Tensor], tuple[Any, tuple[Any, ...]]] = reductions.reduce_tensor
        handles = [{uuid: reduce(self.view(entry))[1]} for entry in manifest]
        return {
            "names": [e.name for e in manifest],
            "dtype_names": [e.dtype for e in manifest],
            "shapes": [list(e.shape) for e in manifest],
            # Pickled, because the call to the engine process carries plain values only.
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode("ascii"),
        }

    def close(self) -> None:
        """Drop the memory."""
        self._memory = torch.empty(0, dtype=torch.uint8)


class IPCPublisher(BufferedPublisher):
    """Publishes to an engine on the trainer's own GPU.

    Args:
        dtype: Wire dtype, best the engine's own.
        device: The GPU that trainer and engine share.
    """

    backend = BACKEND

    def __init__(self, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cuda") -> None:
        super().__init__(dtype)
        self._device = torch.device(device)

    def make_buffer(self, size: int) -> CudaBuffer:
        """A new block of GPU memory."""
        return CudaBuffer(size, self._device)
