"""The engine side of weights in files: a vLLM weight-transfer back end that maps a safetensors file and loads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from async_rl.weights.file import VERSION_KEY, read_weights
from async_rl.weights.vllm_loading import LoadingEngine
from async_rl.weights.vllm_reload import WeightLoadError


@dataclass
class FileInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What :meth:`async_rl.weights.file.FileSource.update_info` sends."""

    path: str
    size: int
    version: int


class FileWeightTransferEngine(LoadingEngine):
    """Loads a whole model from a file that the trainer published; safetensors, so nothing is unpickled."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def open_weights(self, info: FileUpdateInfo) -> list[tuple[str, torch.Tensor]]:
        """Map the file."""
        self.check_intact(info)
        return read_weights(Path(info.path))

    def check_intact(self, info: FileUpdateInfo) -> None:
        """It is there, whole, and holds the version it is said to hold."""
        try:
            size = Path(info.path).stat().st_size
            with safe_open(info.path, framework="pt") as file:
                version = (file.metadata() or {}).get(VERSION_KEY)
        except (OSError, SafetensorError) as error:
            raise WeightLoadError(
                f"can't read the weights of version {info.version} at {info.path}: {error}; the engine must see the "
                "trainer's engine.weights_dir under the same path"
            ) from error
        if (size, version) != (info.size, str(info.version)):
            raise WeightLoadError(
                f"{info.path} should hold version {info.version} in {info.size} bytes, but holds version {version} in "
                f"{size}: another run writes to the same directory"
            )

    def shutdown(self) -> None:
        """Nothing is kept open."""
