"""RunCheckpoint: saves Lightning checkpoints at step boundaries, finds the newest complete one."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint
from typing_extensions import override

from async_rl.checkpoint_io import CheckpointError, flaw
from async_rl.durable import PARTIAL
from async_rl.types import Batch

if TYPE_CHECKING:
    from async_rl.trainer import AsyncRLTrainer

log = logging.getLogger(__name__)
_NAME = re.compile(r"version-(\d+)\.ckpt")
SKIPPED = ".skipped"
"""What is added to the name of a checkpoint newer than the one a run went on from."""


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints of a directory, oldest version first."""
    return sorted((p for p in directory.glob("version-*.ckpt") if _NAME.fullmatch(p.name)), key=version_of)


def version_of(checkpoint: Path) -> int:
    """The policy version in a checkpoint's name."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named as a checkpoint (version-<number>.ckpt)")
    return int(match.group(1))


def version_in(checkpoint: str | os.PathLike[str] | None) -> int:
    """The policy version in a checkpoint's name; 0 without a checkpoint, or where it has another name."""
    match = None if checkpoint is None else _NAME.fullmatch(Path(checkpoint).name)
    return 0 if match is None else int(match.group(1))


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, if there is one; those cut short or damaged are skipped with a warning."""
    skipped, found = [], None
    for path in reversed(checkpoints(directory)):
        if not (why := flaw(path)):
            found = path
            break
        skipped.append((path, why))
    instead = f"{found.name} instead" if found else "version 0 instead, as no other can be used"
    for path, why in skipped:
        log.warning("checkpoint %s is skipped, for %s: going on from %s", path, why, instead)
    return found


class RunCheckpoint(Checkpoint):
    """Saves ``version-<v>.ckpt`` every so many policy versions, every so many seconds, and at the end of training.

    Files are written aside, synced and renamed, so a checkpoint is complete or absent. One that can't be saved (a full
    disk) ends the run, and the ones before it are kept. None is saved when an error ends the run, for the error may be
    in what would be saved: the batches trained since the last checkpoint are in the run's record, and a resume trains
    them again from there without generating anything.

    Args:
        directory: Where checkpoints go.
        every: Save every so many versions; 0: not by version.
        keep_last: How many are kept, >= 1. The oldest goes once a new one is complete.
        every_s: Save at the first step boundary so many seconds after the last one, > 0; ``None``: not by time. What a
            killed run has to train again takes about as long.
        timeout_s: Most seconds the last one may take, > 0, which the trainer's ``shutdown_timeout_s`` does not count;
            then the process is ended.
    """

    def __init__(
        self,
        directory: str | Path,
        every: int = 0,
        keep_last: int = 2,
        every_s: float | None = 1800.0,
        timeout_s: float = 600.0,
    ) -> None:
        if every < 0:
            raise ValueError(f"RunCheckpoint: every={every} must be >= 0")
        if keep_last < 1:
            raise ValueError(f"RunCheckpoint: keep_last={keep_last} must be >= 1")
        if every_s is not None and not every_s > 0:
            raise ValueError(f"RunCheckpoint: every_s={every_s} must be > 0, or None for no saving by time")
        if not timeout_s > 0:
            raise ValueError(f"RunCheckpoint: timeout_s={timeout_s} must be > 0")
        self.directory = Path(directory)
        self.every = every
        self.keep_last = keep_last
        self.every_s = every_s
        self.timeout_s = timeout_s
        self._last_s = time.monotonic()

    def save(self, trainer: AsyncRLTrainer) -> Path | None:
        """Save the current version unless it is saved already or nothing was trained; returns the path.

        Raises:
            CheckpointError: it can't be written; names what is kept.
        """
        version = trainer.global_step
        path = self.directory / f"version-{version:06d}.ckpt"
        if version == 0 or path.exists():
            return None
        try:
            # A large one may take longer than the end of a run is given; one that hangs must not take for ever.
            with trainer.shutdown.extended(self.timeout_s):
                trainer.save_checkpoint(path, weights_only=False)
        except CheckpointError as error:
            last = next(reversed(checkpoints(self.directory)), None)
            kept = f"{last} and the run's record are kept" if last else "the run's record is kept"
            raise CheckpointError(
                f"{error}. {kept}: make room and go on with resume=true run_dir={trainer.run_dir}"
            ) from error
        self._last_s = time.monotonic()
        for old in checkpoints(self.directory)[: -self.keep_last]:
            try:
                old.unlink()
            except OSError as error:
                log.warning("checkpoint %s is not needed any more but can't be deleted: %s", old, error)
        return path

    @override
    def setup(self, trainer: AsyncRLTrainer, pl_module: LightningModule, stage: str) -> None:  # type: ignore[override]
        for partial in self.directory.glob(f"version-*.ckpt{PARTIAL}"):
            log.info("removing %s, which an earlier process did not finish", partial)
            partial.unlink(missing_ok=True)

    @override
    def on_train_start(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        # What is newer than the weights in use must not be taken for this run's: it would stand in the way of saving
        # these versions again, and make the pruning delete the good ones first.
        self._last_s = time.monotonic()
        for path in checkpoints(self.directory):
            if version_of(path) > trainer.global_step:
                aside = path.with_name(path.name + SKIPPED)
                path.rename(aside)
                log.warning("checkpoint %s is newer than what this run goes on from: renamed to %s", path, aside.name)

    @override
    def on_train_batch_end(  # type: ignore[override]
        self, trainer: AsyncRLTrainer, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        due = self.every_s is not None and time.monotonic() - self._last_s >= self.every_s
        if due or (self.every and trainer.global_step % self.every == 0):
            self.save(trainer)

    @override
    def on_train_end(self, trainer: AsyncRLTrainer, pl_module: LightningModule) -> None:  # type: ignore[override]
        self.save(trainer)
