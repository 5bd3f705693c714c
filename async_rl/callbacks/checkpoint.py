"""RunCheckpoint: saves Lightning checkpoints at step boundaries, finds the newest complete one."""

from __future__ import annotations

import logging
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from async_rl.types import Batch

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer

log = logging.getLogger(__name__)
_NAME = re.compile(r"version-(\d+)\.ckpt")


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a directory, oldest version first."""
    return sorted(
        (p for p in directory.glob("version-*.ckpt") if _NAME.fullmatch(p.name)),
        key=lambda p: int(_NAME.fullmatch(p.name).group(1)),  # type: ignore[union-attr]
    )


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, if there is one; truncated ones are skipped with a warning."""
    for path in reversed(checkpoints(directory)):
        try:
            with zipfile.ZipFile(path):
                return path
        except (zipfile.BadZipFile, OSError) as error:
            log.warning("checkpoint %s is not complete (%s); trying the one before", path, error)
    return None


class RunCheckpoint(Checkpoint):
    """Saves ``version-<v>.ckpt`` every so many policy versions and at the end of training.

    Files are written aside and renamed (Lightning's atomic save), so a checkpoint is complete or absent.

    Args:
        directory: Where checkpoints go.
        every: Save every so many versions; 0: only at the end.
        keep_last: How many are kept, >= 1.
    """

    def __init__(self, directory: str | Path, every: int = 0, keep_last: int = 2) -> None:
        if every < 0:
            raise ValueError(f"RunCheckpoint: every={every} must be >= 0")
        if keep_last < 1:
            raise ValueError(f"RunCheckpoint: keep_last={keep_last} must be >= 1")
        self.directory = Path(directory)
        self.every = every
        self.keep_last = keep_last

    def save(self, trainer: AsyncRLTrainer) -> Path | None:
        """Save the current version unless it is saved already or nothing was trained; returns the path."""
        version = trainer.global_step
        path = self.directory / f"version-{version:06d}.ckpt"
        if version == 0 or path.exists():
            return None
        trainer.save_checkpoint(path)
        for old in checkpoints(self.directory)[: -self.keep_last]:
            old.unlink()
        return path

    @override
    def on_train_batch_end(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if self.every and trainer.global_step % self.every == 0:
            self.save(trainer)

    @override
    def on_train_end(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        self.save(trainer)
