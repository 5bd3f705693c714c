"""LoadingEngine: what the vLLM side of every weight path of ours shares: check, stage, load, complete or not at all."""

from __future__ import annotations

import os
from abc import abstractmethod
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from async_rl.weights.staging import WeightStager
from async_rl.weights.vllm_plugin import CORES_VARIABLE


class WeightLoadError(RuntimeError):
    """The published weights can't be loaded: they are gone, torn, or do not fit the model."""


class LoadingEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads a whole model from tensors that are there to be read.

    Everything that can be checked is checked before the model is touched; a load that fails later leaves the model
    unusable, and the engine that asked for it must not be used any more.
    """

    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loaded: dict[str, tuple[int, ...]] = {}  # name and shape of what a complete load consists of
        self._tied: list[Any] = []
        self._staged_version: int | None = None

    @abstractmethod
    def open_weights(self, info: Any) -> list[tuple[str, torch.Tensor]]:
        """The tensors of one version under their Hugging Face names, checked, best without a copy.

        Raises:
            WeightLoadError: they are not there, or not those of that version.
        """

    @abstractmethod
    def check_intact(self, info: Any) -> None:
        """Raise :class:`WeightLoadError` if they were overwritten while they were read."""

    @cached_property
    def stager(self) -> WeightStager:
        """Made for the second load: the first one is needed to know what a complete load consists of."""
        cores = os.environ.get(CORES_VARIABLE, "")
        return WeightStager(self.model, self.vllm_config, [int(core) for core in cores.split(",") if core])

    def init_transfer_engine(self, init_info: Any) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """The reload starts in :meth:`receive_weights`, once the weights have been checked."""

    def stage(self, update_info: Any) -> bool:
        """Begin to prepare a version in the background; ``False`` where only :meth:`receive_weights` can load it.

        Raises:
            WeightLoadError: the weights are gone or torn, or are not what the first load consisted of.
        """
        if not self._loaded or not WeightStager.fits(self.model):
            return False
        weights = self.open_weights(update_info)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights}
        if shapes != self._loaded:
            changed = sorted(n for n in shapes.keys() | self._loaded.keys() if shapes.get(n) != self._loaded.get(n))
            raise WeightLoadError(
                f"the published parameters are not those of the first load: {changed[0]!r} was "
                f"{self._loaded.get(changed[0])}, is {shapes.get(changed[0])}"
            )
        self._staged_version = update_info.version
        self.stager.start(weights)
        return True

    def receive_weights(self, update_info: Any) -> None:
        """Check and load one version, or take it from where it was staged.

        Raises:
            WeightLoadError: the weights are gone or torn, or parameters of the model are missing from them.
        """
        weights = self.open_weights(update_info)
        if self._staged_version is not None:
            if self._staged_version != update_info.version or not self.stager.ready():
                raise WeightLoadError(f"version {self._staged_version} is staged, {update_info.version} was asked for")
            return
        initialize_layerwise_reload(self.model)
        self.model.load_weights(weights)
        self._tied = _check_complete(self.model)
        self.check_intact(update_info)
        self._loaded = {name: tuple(tensor.shape) for name, tensor in weights}

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
