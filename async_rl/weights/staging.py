"""WeightStager: prepares new weights in the engine process while it generates, so that the swap takes milliseconds."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype


class WeightStager:
    """Fills a second copy of the model and prepacks its matrices in a background thread, then exchanges the two.

    On the CPU two thirds of a load are spent prepacking matrices for oneDNN. None of that has to happen while
    generation stands still: only the exchange of pointers does.

    Args:
        model: The model that generates.
        vllm_config: Its config.
        cores: Cores the thread may use; empty: those of the engine.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, cores: Iterable[int] = ()) -> None:
        config = copy.copy(vllm_config)
        config.compilation_config = copy.copy(vllm_config.compilation_config)
        config.compilation_config.static_forward_context = {}  # layers of the copy register under the same names
        with set_default_torch_dtype(vllm_config.model_config.dtype):
            self._shadow = initialize_model(config)
        self._cores = frozenset(cores)
        self._layers = list(zip(model.modules(), self._shadow.modules(), strict=True))
        # By identity: tied parameters must be exchanged once.
        self._parameters = {id(p): (p, q) for p, q in self._stored_parameters()}
        self._packed: list[tuple[Any, Callable[..., torch.Tensor]]] = []  # layer, its new matrix multiplication
        self._retired: list[Callable[..., torch.Tensor]] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @staticmethod
    def fits(model: torch.nn.Module) -> bool:
        """Whether all that happens to this model's weights after loading is the packing of plain matrices."""
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if method is not None and type(method) not in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
                return False
            if hasattr(layer, "process_weights_after_loading") and type(layer) is not Attention:
                return False
            # 1: an empty weight, whose matrix is packed.
            if hasattr(layer, "cpu_linear") and layer.get_parameter("weight").dim() not in (1, 2):
                return False
        return True

    def start(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Begin to load ``weights``, which must cover the model. One at a time."""
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(weights,), name="weight-stager", daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        """Whether the weights can be exchanged; raises what went wrong."""
        if self._thread is None or self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def swap(self) -> None:
        """Exchange the staged weights for those of the model. Call while nothing runs."""
        for ours, theirs in self._parameters.values():
            ours.data, theirs.data = theirs.data, ours.data
        for layer, packed in self._packed:
            self._retired.append(layer.cpu_linear)
            layer.cpu_linear = packed
        self._packed = []
        self._thread = None

    def _stored_parameters(self) -> Iterable[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        for ours, theirs in self._layers:
            for name, parameter in ours._parameters.items():
                if parameter is not None and parameter.numel():  # a packed matrix leaves an empty one behind
                    yield parameter, theirs._parameters[name]

    @torch.no_grad()
    def _run(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            if self._cores and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, self._cores)  # of this thread only
            self._retired.clear()  # frees the last version's matrices, which takes a while too
            self._shadow.load_weights(weights)
            for ours, theirs in self._layers:
                if hasattr(ours, "cpu_linear"):
                    packed = SimpleNamespace(weight=theirs.weight, bias=getattr(theirs, "bias", None))
                    dispatch_cpu_unquantized_gemm(packed, remove_weight=False)
                    self._packed.append((ours, packed.cpu_linear))
        except BaseException as error:  # handed to whoever asks ready()
            self._error = error
