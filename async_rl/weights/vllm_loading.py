"""LoadingEngine: the vLLM side of the weight paths whose weights lie ready to be read: check, stage, load."""

from __future__ import annotations

import os
from abc import abstractmethod
from functools import cached_property
from typing import Any

import torch

from async_rl.weights.staging import WeightStager
from async_rl.weights.vllm_plugin import CORES_VARIABLE
from async_rl.weights.vllm_reload import ReloadingEngine, WeightLoadError


class LoadingEngine(ReloadingEngine):
    """Loads a whole model from tensors that are there to be read.

    Everything that can be checked is checked before the model is touched.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loaded: dict[str, tuple[int, ...]] = {}  # name and shape of what a complete load consists of
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

        def load() -> None:
            self.model.load_weights(weights)
            self.check_intact(update_info)

        self.reload(load)
        self._loaded = {name: tuple(tensor.shape) for name, tensor in weights}

    def finish_weight_update(self) -> None:
        """Put the loaded weights in place, the prepacked output projection included."""
        if self._staged_version is not None:
            self._staged_version = None
            self.stager.swap()
            return
        super().finish_weight_update()
