"""The two ends of the weight path: a publisher in the trainer, a source that an engine loads from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """One published version of the weights, readable until it is released."""

    backend: str
    """Name of the vLLM weight-transfer back end that understands :meth:`update_info`."""
    version: int

    def update_info(self) -> Mapping[str, Any]:
        """What the other process needs to read the weights (plain picklable values)."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, for an engine in this process. Read-only views."""
        ...

    def release(self) -> None:
        """Give the buffer back to the publisher; the source must not be read afterwards. Idempotent."""
        ...


class WeightPublisher(Protocol):
    """Copies the trainer's weights to where engines can load them; the only thing the optimizer waits for."""

    def publish(self, parameters: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightSource:
        """Copy the weights aside and return the source. Blocks for the copy, never for a load that is going on."""
        ...

    def close(self) -> None:
        """Free the memory and remove what was created. Idempotent."""
        ...
