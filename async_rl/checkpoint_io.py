"""DurableCheckpointIO: writes a checkpoint beside its place, syncs it to the disk, then renames it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from typing_extensions import override

from async_rl.durable import durable_file
from async_rl.types import RunError


class CheckpointError(RunError):
    """A checkpoint can't be saved; names the file and what is kept."""


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
                torch.save(checkpoint, file)
        except (OSError, RuntimeError) as error:  # torch's writer turns some errors of the disk into the latter
            raise CheckpointError(f"can't save checkpoint {path}: {error}") from error


def flaw(path: Path) -> str:
    """What is wrong with a checkpoint file: cut short, or bytes changed; empty where nothing is.

    Reads the whole file and compares the checksums that ``torch.save`` wrote, about a gigabyte per second.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a damaged archive makes the reader fail in many ways
        return str(error) or type(error).__name__
    return f"{damaged} is damaged" if damaged else ""
