"""DurableCheckpointIO: writes a checkpoint beside its place, syncs it to the disk, then renames it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from async_rl.durable import durable_file
from async_rl.types import RunError


class CheckpointError(RunError):
    """A checkpoint can't be saved or read; names the file and what is kept."""


class DurableCheckpointIO(TorchCheckpointIO):
    """Saves so that a file is complete or absent, whatever ends the process or the machine.

    Lightning's own writes into the system's temporary directory and moves the file, which copies it where the run
    directory is on another disk: killed meanwhile, it leaves half a checkpoint under the final name. It syncs nothing,
    and holds a second copy of the whole checkpoint in memory.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``.

        Raises:
            CheckpointError: it can't be written; no part of it is left.
        """
        if "://" in str(path):  # an object store: whole or absent by itself
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            with durable_file(Path(path)) as file:
                target = _File(file)
                try:
                    torch.save(checkpoint, target)  # type: ignore[arg-type]
                except RuntimeError as error:
                    raise target.error or error from None
        except OSError as error:
            raise CheckpointError(f"can't save checkpoint {path}: {error.strerror or error}") from error

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, loc: storage, weights_only: Any = True
    ) -> Any:
        """Read a checkpoint: tensors and plain values only, whatever is asked for; no code in the file is run.

        Raises:
            CheckpointError: it holds anything else.
        """
        try:
            return super().load_checkpoint(path, map_location, weights_only=True)
        except UnpicklingError as error:
            raise CheckpointError(
                f"checkpoint {path} holds more than tensors and plain values, and no code is run to read it: let "
                "state_dict() and on_save_checkpoint() of callbacks and modules give such values only"
            ) from error


class _File:
    """A file that remembers what went wrong with the disk: ``torch.save`` makes a puzzle of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def flaw(path: Path) -> str:
    """What is wrong with a checkpoint file, for people: "it is cut short", or bytes changed; empty where nothing is.

    Reads the whole file and compares the checksums that ``torch.save`` wrote, two gigabytes per second where the
    disk gives them.
    """
    try:
        if path.stat().st_size == 0:
            return "it is empty"
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):  # what makes it one comes last in the file
                return "it is cut short"
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
    except Exception as error:  # a damaged archive makes the reader fail in many ways
        return f"it can't be read ({str(error) or type(error).__name__})"
    return f"bytes of it have changed (in {damaged})" if damaged else ""
