"""The engine side of shared-memory weights: a vLLM weight-transfer back end that maps a buffer and loads it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from async_rl.weights.buffers import DATA_OFFSET, ManifestEntry
from async_rl.weights.shared_memory import HEADER, MAGIC, tensor_view
from async_rl.weights.staging import WeightStager
from async_rl.weights.vllm_plugin import CORES_VARIABLE


class WeightLoadError(RuntimeError):
    """The published weights can't be loaded: the buffer is gone, torn, or does not fit the model."""


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


class SharedMemoryWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads a whole model from a mapped buffer.

    Everything that can be checked is checked before the model is touched; a load that fails later leaves the model
    unusable, and the engine that asked for it must not be used any more.
    """

    init_info_cls = SharedMemoryInitInfo
    update_info_cls = SharedMemoryUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Mappings are kept: the pages of a buffer that is used again are then already in this process's page table.
        self._mappings: dict[tuple[str, int], mmap.mmap] = {}
        self._loaded: dict[str, tuple[int, ...]] = {}  # name and shape of what a complete load consists of
        self._tied: list[Any] = []
        self._staged_version: int | None = None

    @cached_property
    def stager(self) -> WeightStager:
        """Made for the second load: the first one is needed to know what a complete load consists of."""
        cores = os.environ.get(CORES_VARIABLE, "")
        return WeightStager(self.model, self.vllm_config, [int(core) for core in cores.split(",") if core])

    def init_transfer_engine(self, init_info: SharedMemoryInitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """The reload starts in :meth:`receive_weights`, once the buffer has been checked."""

    def stage(self, update_info: SharedMemoryUpdateInfo) -> bool:
        """Begin to prepare a version in the background; ``False`` where only :meth:`receive_weights` can load it.

        Raises:
            WeightLoadError: the buffer is gone or torn, or does not hold what the first load held.
        """
        if not self._loaded or not WeightStager.fits(self.model):
            return False
        memory, manifest = self._open(update_info)
        shapes = {entry.name: entry.shape for entry in manifest}
        if shapes != self._loaded:
            changed = sorted(n for n in shapes.keys() | self._loaded.keys() if shapes.get(n) != self._loaded.get(n))
            raise WeightLoadError(
                f"the published parameters are not those of the first load: {changed[0]!r} was "
                f"{self._loaded.get(changed[0])}, is {shapes.get(changed[0])}"
            )
        self._staged_version = update_info.version
        self.stager.start([(entry.name, tensor_view(memory, entry)) for entry in manifest])
        return True

    def receive_weights(self, update_info: SharedMemoryUpdateInfo) -> None:
        """Map, check and load one version, or take it from where it was staged.

        Raises:
            WeightLoadError: the buffer is gone or torn, or parameters of the model are missing from it.
        """
        memory, manifest = self._open(update_info)
        if self._staged_version is not None:
            if self._staged_version != update_info.version or not self.stager.ready():
                raise WeightLoadError(f"version {self._staged_version} is staged, {update_info.version} was asked for")
            return
        initialize_layerwise_reload(self.model)
        self.model.load_weights((entry.name, tensor_view(memory, entry)) for entry in manifest)
        self._tied = _check_complete(self.model)
        _check_header(memory, update_info)
        self._loaded = {entry.name: entry.shape for entry in manifest}

    def finish_weight_update(self) -> None:
        """Put the loaded weights in place, the prepacked output projection included."""
        if self._staged_version is not None:
            self._staged_version = None
            self.stager.swap()
            return
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self._tied:
            # On CPU the output projection keeps a prepacked copy of its weight. With tied embeddings the reload sees
            # the weight only in the input embedding and leaves that copy as it was, without a word.
            if hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Drop the mappings (tensors over them, if any are left, keep theirs)."""
        self._mappings.clear()

    def _open(self, info: SharedMemoryUpdateInfo) -> tuple[mmap.mmap, list[ManifestEntry]]:
        memory = self._map(info)
        manifest = [ManifestEntry(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in info.manifest]
        _check_manifest(manifest, info.size)
        _check_header(memory, info)
        return memory, manifest

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


def _check_complete(model: torch.nn.Module) -> list[Any]:
    """Every parameter must have been loaded whole, or share its storage with one that was (tied weights).

    Returns:
        The layers with tied weights, which a reload passes over.
    """
    loaded_storages: set[int] = set()
    unloaded: list[tuple[str, int]] = []
    tied: list[Any] = []
    for layer_name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load():  # loaded and put in place
            loaded_storages.update(p.data_ptr() for p in layer.parameters(recurse=False) if p.numel())
            continue
        parameters = info.kernel_tensors[0] if info.kernel_tensors is not None else {}
        wanted = sum(p.numel() for p in info.restore_metadata[0].values())
        # A vocabulary padded to a round size is never loaded to the last row.
        whole = info.load_numel >= wanted or (isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0)
        if not whole:
            tied.append(layer)
        for name, parameter in parameters.items():
            if whole and parameter.numel():
                loaded_storages.add(parameter.data_ptr())
            elif not whole:
                unloaded.append((f"{layer_name}.{name}", parameter.data_ptr() if parameter.numel() else 0))
    absent = [name for name, storage in unloaded if not storage or storage not in loaded_storages]
    if absent:
        raise WeightLoadError(
            f"{len(absent)} parameters of the engine's model were not, or only partly, in the published weights, for"
            f" example {absent[0]!r}: publish every parameter under its Hugging Face name"
        )
    return tied
