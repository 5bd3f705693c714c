"""RunDirectory: a run directory that one process has, and can give back as it was; and who may have one."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from async_rl.config import ConfigError, Problem, RunConfig
from async_rl.durable import durable_file
from async_rl.earlier_config import CONFIG, RECORD
from async_rl.orchestrator.ledger_reader import holds_groups
from async_rl.resume_rules import DATABASE
from async_rl.run_lock import LOCK, RunLock
from async_rl.types import SettingError

CHECKPOINTS, ASIDE = "checkpoints", ".overwritten"


class RunDirectory:
    """A run directory that is this process's alone, until :meth:`release`.

    Args:
        path: The directory; made with its parents where it is missing.
        exist_ok: It may be there already.

    Raises:
        SettingError: another process, or another fit of this one, has it; names that process.
        OSError: it can't be made, or is there.
    """

    def __init__(self, path: Path, *, exist_ok: bool) -> None:
        self._path = path
        self._aside = path / ASIDE
        self._made = [p for p in (path, *path.parents) if not p.exists()]
        self._before = {entry.name for entry in path.iterdir()} if not self._made else set()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=exist_ok)
        self._lock = RunLock(path)
        files = [path / name for name in (CONFIG, RECORD)]
        self._contents = {file: file.read_bytes() for file in files if file.is_file()}

    def overwrite(self) -> None:
        """Put what is in it aside, to be deleted when the run begins: one that does not begin deletes nothing."""
        shutil.rmtree(self._aside, ignore_errors=True)  # of a process that was killed before its run began
        self._aside.mkdir()
        for name in self._before - {LOCK, ASIDE}:
            (self._path / name).rename(self._aside / name)
        self._contents = {}
        self._before &= {LOCK}

    @property
    def overwrites(self) -> bool:
        """Whether something is put aside: the run has not begun."""
        return self._aside.exists()

    def begin(self) -> None:
        """Delete what was put aside."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def restore(self) -> bool:
        """Leave on disk what was there before: a run that was refused has nothing to show. Ends with :meth:`release`.

        The next resume must not go on with settings that were refused, so those of before come back, too.

        Returns:
            Whether it was done; not where something was recorded or saved.
        """
        new_checkpoints = CHECKPOINTS not in self._before and (self._path / CHECKPOINTS).exists()
        if new_checkpoints or (DATABASE not in self._before and holds_groups(self._path / DATABASE)):
            return False
        self._remove_what_is_new()
        for file, content in self._contents.items():
            with durable_file(file) as restored:
                restored.write(content)
        if self._aside.exists():
            for entry in self._aside.iterdir():
                entry.rename(self._path / entry.name)
            self._aside.rmdir()
        if LOCK not in self._before:
            self._lock.remove()
        for made in self._made:
            with suppress(OSError):  # another run's directory is in it
                made.rmdir()
        return True

    def release(self) -> None:
        """Let others have it. Idempotent."""
        self._lock.release()

    def _remove_what_is_new(self) -> None:
        for entry in self._path.iterdir():
            if entry.name in self._before or entry.name in (LOCK, ASIDE):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def claim_directory(config: RunConfig) -> RunDirectory:
    """Make the run directory and take it for this process, refusing one that is in use.

    Returns:
        The directory; to be released when the run has ended.

    Raises:
        ConfigError: it holds something and neither ``resume`` nor ``overwrite`` is set; another process is using it;
            ``overwrite`` would delete something that is no run, or the run that is to be replayed; or ``resume`` or
            ``replay`` finds nothing.
    """
    directory = Path(config.run_dir)
    if config.replay is not None:
        _check_replay(Path(config.replay), directory)
    existed = directory.exists()
    used = existed and (not directory.is_dir() or any(entry.name != LOCK for entry in directory.iterdir()))
    is_run = (directory / RECORD).is_file()
    if config.resume and not is_run:
        raise ConfigError(
            [
                Problem(
                    "resume", f"there is no run in {directory}; give the directory of the run to go on with as run_dir"
                )
            ]
        )
    if used and config.overwrite:
        if not is_run:
            raise ConfigError(
                [
                    Problem(
                        "overwrite",
                        f"{directory} is not empty and holds no {RECORD}, so it is not deleted; take another",
                    )
                ]
            )
    elif used and not config.resume:
        raise ConfigError(
            [
                Problem(
                    "run_dir",
                    f"{directory} is already used; give another one, go on with it (resume=true), or delete it "
                    "(overwrite=true)",
                )
            ]
        )
    try:
        # Where there was nothing, a directory that is there now belongs to a run that was faster.
        claimed = RunDirectory(directory, exist_ok=existed)
    except SettingError as error:
        raise ConfigError([Problem("", str(error))]) from error
    except OSError as error:
        raise ConfigError([Problem("run_dir", f"{directory} can't be made: {error.strerror}")]) from error
    if used and config.overwrite:
        claimed.overwrite()
    return claimed


def _check_replay(replayed: Path, directory: Path) -> None:
    if not (replayed / DATABASE).is_file():
        raise ConfigError(
            [Problem("replay", f"there is no run's record ({DATABASE}) in {replayed}; give the directory of a run")]
        )
    if directory.resolve() in (replayed.resolve(), *replayed.resolve().parents):
        raise ConfigError([Problem("run_dir", f"{directory} holds the run to be replayed; take another one")])
