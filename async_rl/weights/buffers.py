"""BufferedPublisher: the part of publishing that every back end shares: layout, spare buffers, who still reads what."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DATA_OFFSET = 4096
"""Bytes kept free at the start of every buffer."""
ALIGNMENT = 64


class WeightsReplacedError(RuntimeError):
    """A source was read after its buffer had been given to a newer version."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """Where one parameter lies in a buffer.

    Attributes:
        name: Hugging Face name of the parameter.
        dtype: Name of its dtype in the buffer, for example ``"bfloat16"``.
        shape: Its shape.
        offset: Bytes from the start of the buffer. Tied parameters share one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size of the parameter in the buffer, bytes."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.Size(self.shape).numel() * dtype.itemsize


class Buffer(ABC):
    """One block of memory that holds one version at a time."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.readers = 0  # sources that were reserved or read, and not yet released

    @abstractmethod
    def view(self, entry: ManifestEntry) -> torch.Tensor:
        """The parameter's place in this buffer, without a copy."""

    @abstractmethod
    def begin(self) -> None:
        """A version is about to be written."""

    @abstractmethod
    def finish(self, version: int) -> None:
        """``version`` has been written; another process may read it when this returns."""

    @abstractmethod
    def update_info(self, version: int, manifest: Sequence[ManifestEntry]) -> Mapping[str, Any]:
        """What the engine process needs to find and read it."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory as soon as nobody maps it."""


class BufferedSource:
    """One published version (a :class:`~async_rl.weights.base.WeightSource`)."""

    def __init__(self, publisher: BufferedPublisher, buffer: Buffer, version: int) -> None:
        self._publisher = publisher
        self._buffer = buffer
        self._reserved = False
        self._released = False
        self.backend = publisher.backend
        self.version = version

    def reserve(self) -> None:
        """Keep the buffer from newer versions until :meth:`release`; reading does so, too.

        Raises:
            WeightsReplacedError: the buffer was reused, or the source released.
        """
        with self._publisher.lock:
            if self._released or self._buffer.version != self.version:
                raise WeightsReplacedError(
                    f"the weights of policy version {self.version} are gone (their buffer now holds "
                    f"{self._buffer.version}): load the newest published version, and read a source before releasing it"
                )
            if not self._reserved:
                self._reserved = True
                self._buffer.readers += 1

    def update_info(self) -> Mapping[str, Any]:
        """What the engine process needs to read the weights.

        Raises:
            WeightsReplacedError: the buffer was reused, or the source released.
        """
        self.reserve()
        return self._buffer.update_info(self.version, self._publisher.manifest)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, in the wire dtype; views that must not be written."""
        self.reserve()
        for entry in self._publisher.manifest:
            yield entry.name, self._buffer.view(entry)

    def release(self) -> None:
        """Give the buffer back. Idempotent."""
        with self._publisher.lock:
            if self._reserved and not self._released:
                self._buffer.readers -= 1
            self._released = True


class BufferedPublisher(ABC):
    """Copies named parameters into a spare buffer, in the engine's dtype (a ``WeightPublisher``).

    ``publish`` never waits for a load: it writes to a buffer that nobody reads and that does not hold the newest
    version, and makes one where there is none. So the newest version can always be read, an older one that nobody has
    reserved or begun to read may be replaced, and one that is being read is never touched. Two buffers are the usual
    number.

    Args:
        dtype: Wire dtype, best the engine's own: bfloat16 halves the bytes of float32 weights.
    """

    backend: str

    def __init__(self, dtype: torch.dtype) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"the wire dtype must be a floating-point dtype, not {dtype}")
        self.lock = threading.Lock()
        self.dtype = dtype
        self.manifest: tuple[ManifestEntry, ...] = ()
        self._size = 0
        self._buffers: list[Buffer] = []
        self._newest: Buffer | None = None
        self._closed = False

    @abstractmethod
    def make_buffer(self, size: int) -> Buffer:
        """A new buffer of ``size`` bytes."""

    def publish(self, parameters: Iterable[tuple[str, torch.Tensor]], version: int) -> BufferedSource:
        """Copy ``parameters`` and return the source of ``version``. Blocks for the copy only.

        Args:
            parameters: Name and tensor of every parameter, on any device, in the same order every time. Names that
                share one tensor (tied weights) are written once.
            version: Policy version, >= 0.

        Raises:
            ValueError: names, shapes or their order differ from the first call, or the version is negative.
            RuntimeError: the publisher is closed.
        """
        if self._closed:
            raise RuntimeError(f"publish of version {version} after close: make a new {type(self).__name__}")
        if version < 0:
            raise ValueError(f"a policy version is >= 0, not {version}")
        named = [(name, tensor.detach()) for name, tensor in parameters]
        if not self.manifest:
            self.manifest, self._size = layout(named, self.dtype)
        check_same(self.manifest, named)
        buffer = self._spare_buffer()
        buffer.begin()
        written: set[int] = set()
        for entry, (_, tensor) in zip(self.manifest, named, strict=True):
            if entry.offset not in written:
                written.add(entry.offset)
                buffer.view(entry).copy_(tensor)
        buffer.finish(version)
        with self.lock:
            buffer.version = version
            self._newest = buffer
        return self.make_source(buffer, version)

    def make_source(self, buffer: Buffer, version: int) -> BufferedSource:
        """The source of a version that has been written."""
        return BufferedSource(self, buffer, version)

    def _spare_buffer(self) -> Buffer:
        with self.lock:
            for buffer in self._buffers:
                if buffer.readers == 0 and buffer is not self._newest:
                    buffer.version = None
                    return buffer
        buffer = self.make_buffer(self._size)
        with self.lock:
            self._buffers.append(buffer)
        return buffer

    def close(self) -> None:
        """Free the memory. Sources handed out can't be opened by another process any more. Idempotent."""
        with self.lock:
            self._closed = True
            for buffer in self._buffers:
                buffer.version = None
                buffer.close()
            self._buffers.clear()
            self._newest = None


def layout(named: Sequence[tuple[str, torch.Tensor]], dtype: torch.dtype) -> tuple[tuple[ManifestEntry, ...], int]:
    """Place every distinct tensor at an aligned offset; names of one tensor get one place.

    Returns:
        The manifest, and the size of a buffer in bytes.
    """
    if not named:
        raise ValueError("there is no parameter to publish: pass module.named_parameters()")
    places: dict[tuple[Any, ...], int] = {}
    entries = []
    end = DATA_OFFSET
    wire = str(dtype).removeprefix("torch.")
    for name, tensor in named:
        identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        key = identity if tensor.numel() else (name,)
        if key not in places:
            places[key] = end
            end += -(-tensor.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        entries.append(ManifestEntry(name, wire, tuple(tensor.shape), places[key]))
    return tuple(entries), end


def check_same(manifest: Sequence[ManifestEntry], named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise ``ValueError`` unless names, shapes and order are those of the first publish."""
    before = [(e.name, e.shape) for e in manifest]
    now = [(name, tuple(tensor.shape)) for name, tensor in named]
    if before != now:
        changed = next((pair for pair in zip(before, now, strict=False) if pair[0] != pair[1]), None)
        detail = f"{changed[0]} was there, now {changed[1]}" if changed else f"{len(before)} were there, now {len(now)}"
        raise ValueError(f"the parameters must be those of the first publish, in the same order: {detail}")
