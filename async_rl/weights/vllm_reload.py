"""ReloadingEngine: what the vLLM side of every weight path of ours shares: the model is loaded whole, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


class WeightLoadError(RuntimeError):
    """The published weights can't be loaded: they are gone, torn, or do not fit the model."""


class ReloadingEngine(WeightTransferEngine):  # type: ignore[misc]
    """Replaces every parameter of the model, and notices where one was left out.

    A load that fails leaves the model unusable until another one succeeds: the engine that asked for it must not be
    used any more.
    """

    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tied: list[Any] = []

    def start_weight_update(self) -> None:
        """The reload starts in :meth:`reload`, once there are weights."""

    def reload(self, load: Callable[[], None]) -> None:
        """Have ``load`` give the model all its weights, by ``model.load_weights`` called once or more.

        Raises:
            WeightLoadError: parameters of the model are missing from them.
        """
        initialize_layerwise_reload(self.model)
        try:
            load()
            self._tied = check_complete(self.model)
        except BaseException:
            # Or the layers that got a part of theirs would count it for the next load.
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        """Put the loaded weights in place, the prepacked output projection included."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in self._tied:
            # On CPU the output projection keeps a prepacked copy of its weight. With tied embeddings the reload sees
            # the weight only in the input embedding and leaves that copy as it was, without a word.
            if hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)


def check_complete(model: torch.nn.Module) -> list[Any]:
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
