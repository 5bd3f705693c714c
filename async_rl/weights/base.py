"""The two ends of the weight path: a publisher in the trainer, a source that an engine loads from, or is sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class WeightSource(Protocol):
    """One published version of the weights: the newest one can be read, an older one if it was reserved in time."""

    backend: str
    """Name of the vLLM weight-transfer back end that understands :meth:`update_info`."""
    version: int

    def update_info(self) -> Mapping[str, Any]:
        """What the other process needs to read the weights (plain picklable values)."""
        ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, for an engine in this process. Read-only views."""
        ...

    def reserve(self) -> None:
        """Keep it readable until it is released: it has been chosen, and newer ones may come before it is read."""
        ...

    def release(self) -> None:
        """Give the buffer back to the publisher; the source must not be read afterwards. Idempotent."""
        ...


class WeightLink(Protocol):
    """The trainer's end of a connection over which one engine is sent its weights, for as long as that engine lives.

    Both ends have to be at it together: :meth:`open` and :meth:`send` return when the engine has done its part, so they
    are called from a thread of their own. :meth:`close` ends them from another one.
    """

    name: str
    """Unique; goes with everything that the engine is told, so that it can't take one link for another."""

    def init_info(self) -> Mapping[str, Any]:
        """What the engine needs to join (plain values; whoever knows them could join in its place)."""
        ...

    def open(self) -> None:
        """Meet the engine."""
        ...

    def send(self, source: WeightSource) -> None:
        """Send a version. Raises where it did not arrive whole."""
        ...

    def close(self) -> None:
        """Give up what is going on and free everything; may block for seconds. Idempotent."""
        ...


@runtime_checkable
class SentSource(WeightSource, Protocol):
    """Weights that an engine can't fetch: they are sent to it."""

    def link(self, workers: int) -> WeightLink:
        """A new link to an engine of so many worker processes; good for later versions too."""
        ...


class WeightPublisher(Protocol):
    """Copies the trainer's weights to where engines can load them; the only thing the optimizer waits for."""

    def publish(self, parameters: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightSource:
        """Copy the weights aside and return the source. Blocks for the copy, never for a load that is going on."""
        ...

    def close(self) -> None:
        """Free the memory and remove what was created. Idempotent."""
        ...
