"""FilePublisher: each version of the trainer's weights as a safetensors file, for engines elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from async_rl.weights.buffers import ManifestEntry, WeightsReplacedError, check_same, layout

BACKEND = "async_rl_file"
"""Name under which the engine side (:mod:`async_rl.weights.file_backend`) is registered with vLLM."""

VERSION_KEY = "version"
ALIASES_KEY = "aliases"
"""Metadata of a file: JSON of the names that share another name's tensor (tied weights)."""


class FileSource:
    """One published version (a :class:`~async_rl.weights.base.WeightSource`); its file lives until it is released."""

    backend = BACKEND

    def __init__(self, path: Path, version: int) -> None:
        self.version = version
        self._path = path
        self._size = path.stat().st_size

    def update_info(self) -> Mapping[str, Any]:
        """Path, size and version.

        Raises:
            WeightsReplacedError: the source was released.
        """
        if not self._path.exists():
            raise WeightsReplacedError(f"{self._path} is gone: load the newest published version")
        return {"path": str(self._path), "size": self._size, "version": self.version}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, in the wire dtype; views of the file that must not be written."""
        self.update_info()
        yield from read_weights(self._path)

    def reserve(self) -> None:
        """Nothing to do: the file is there until it is released."""

    def release(self) -> None:
        """Remove the file. Idempotent."""
        self._path.unlink(missing_ok=True)


class FilePublisher:
    """Writes each version to ``version-<number>.safetensors`` in one directory (a ``WeightPublisher``).

    A file is written under another name and renamed when it is whole, and removed when its source is released. The
    directory belongs to one publisher at a time; what an earlier one left there is removed.

    Args:
        directory: Where; engines must see it under the same path. On one machine ``/dev/shm`` is fastest.
        dtype: Wire dtype, best the engine's own.

    Raises:
        ValueError: the directory is in use by another run, or the dtype is not a floating-point one.
    """

    backend = BACKEND

    def __init__(self, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"the wire dtype must be a floating-point dtype, not {dtype}")
        self.directory = Path(directory).absolute()
        self.dtype = dtype
        self.manifest: tuple[ManifestEntry, ...] = ()
        self._made = not self.directory.exists()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ValueError(
                f"engine.weights_dir={self.directory} is in use by another run: give each run a directory of its own"
            ) from error
        self._closed = False
        self._remove_files()

    def publish(self, parameters: Iterable[tuple[str, torch.Tensor]], version: int) -> FileSource:
        """Write ``parameters`` and return the source of ``version``. Blocks for the writing only.

        Args:
            parameters: Name and tensor of every parameter, on any device, in the same order every time. Names that
                share one tensor (tied weights) are written once.
            version: Policy version, >= 0.

        Raises:
            ValueError: names, shapes or their order differ from the first call, or the version is negative.
            OSError: the file can't be written; names it. Nothing half-written is left.
            RuntimeError: the publisher is closed.
        """
        if self._closed:
            raise RuntimeError(f"publish of version {version} after close: make a new {type(self).__name__}")
        if version < 0:
            raise ValueError(f"a policy version is >= 0, not {version}")
        named = [(name, tensor.detach()) for name, tensor in parameters]
        if not self.manifest:
            self.manifest, _ = layout(named, self.dtype)
        check_same(self.manifest, named)
        names, aliases = _distinct(self.manifest)
        tensors = {name: tensor.to(self.dtype).contiguous().cpu() for name, tensor in named if name in names}
        path = next(path for path in self._paths(version) if not path.exists())
        aside = path.with_suffix(".tmp")
        try:
            save_file(tensors, aside, metadata={VERSION_KEY: str(version), ALIASES_KEY: json.dumps(aliases)})
            os.replace(aside, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise OSError(f"the weights of version {version} can't be written to {path}: {error}") from error
        return FileSource(path, version)

    def close(self) -> None:
        """Remove the files, and the directory if it was made here. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._remove_files()
        (self.directory / ".lock").unlink(missing_ok=True)
        os.close(self._lock)
        if self._made:
            with contextlib.suppress(OSError):  # somebody put a file there: it stays
                self.directory.rmdir()

    def _paths(self, version: int) -> Iterator[Path]:
        """Names for a version, the usual one first: one that is published again gets a file of its own."""
        yield self.directory / f"version-{version:06d}.safetensors"
        for n in itertools.count(2):
            yield self.directory / f"version-{version:06d}-{n}.safetensors"

    def _remove_files(self) -> None:
        for pattern in ("version-*.safetensors", "version-*.tmp"):
            for file in self.directory.glob(pattern):
                file.unlink(missing_ok=True)


def read_weights(path: Path) -> list[tuple[str, torch.Tensor]]:
    """Every parameter of a published file under each of its names; views of the mapped file.

    Raises:
        OSError: it is not there or can't be read.
        safetensors.SafetensorError: it is cut short or no safetensors file.
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        aliases: dict[str, str] = json.loads(file.metadata()[ALIASES_KEY])
    return [*tensors.items(), *((alias, tensors[name]) for alias, name in aliases.items())]


def _distinct(manifest: Sequence[ManifestEntry]) -> tuple[set[str], dict[str, str]]:
    """The first name of every tensor, and the further names with the first one of each."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for entry in manifest:
        if first.setdefault(entry.offset, entry.name) != entry.name:
            aliases[entry.name] = first[entry.offset]
    return set(first.values()), aliases
