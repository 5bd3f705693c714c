"""durable_file: a file that is complete and on the disk, or absent, whatever ends the process or the machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"
"""What the name of a file that is being written ends with."""


@contextlib.contextmanager
def durable_file(place: Path) -> Iterator[BinaryIO]:
    """Write ``place`` anew: aside, synced to the disk, renamed at the end of the block.

    Raises:
        OSError: It can't be written; no part of it is left, and what was there before still is.
    """
    aside = place.with_name(place.name + PARTIAL)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, place)
        sync_directory(place.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable: a rename is on the disk only once its directory is."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
