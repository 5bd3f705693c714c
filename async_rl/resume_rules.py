"""What gives the data of a run its meaning, and how a resume that changes it is refused. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from async_rl.orchestrator.ledger_reader import holds_groups
from async_rl.types import SettingError

DATABASE = "run.db"
"""What a run recorded of its groups and batches, in its directory."""
MEANING = (
    "model.name_or_path",
    "model.revision",
    "model.warm_up",
    "environment",
    "batch_size",
    "group_size",
    "seed",
    "rollout.epochs",
    "rollout.shuffle",
    "rollout.mixture",
    "rollout.sampling.temperature",
)
"""Keys (sections with all they hold) that say which prompt a group is for, what a batch is and what tokens mean."""
_MEASURED = ("model", "model.weights", "model.vocabulary")
"""What the trainer finds out beyond the config."""
_ABSENT = "nothing"


def may_be_allowed(name: str) -> bool:
    """Whether ``resume_allow`` may hold this name: a key of :data:`MEANING` or one inside it, or ``model``."""
    return name in _MEASURED or any(name == key or name.startswith(f"{key}.") for key in MEANING)


def check_arguments(resume: bool, resume_allow: Collection[str], replay: str | os.PathLike[str] | None) -> None:
    """Refuse what a trainer can't be given.

    Raises:
        ValueError: the message names the argument and the fix.
    """
    for name in resume_allow:
        if not may_be_allowed(name):
            raise ValueError(f"resume_allow={name!r} is nothing a resume refuses; give of {', '.join(MEANING)}")
    if resume_allow and not resume:
        raise ValueError(f"resume_allow={list(resume_allow)} without resume=True has no effect; remove it")
    if resume and replay is not None:
        raise ValueError(f"replay={os.fspath(replay)!r} with resume=True: a replay starts at version 0; remove one")


def check_directory(run_dir: Path, resume: bool, checkpoint: str | os.PathLike[str] | None) -> None:
    """Refuse to resume where there is no record, and to begin a run where there is one: both would be mixed up.

    Args:
        run_dir: Where the run is to write.
        resume: Go on with the run there.
        checkpoint: What it is told to start from; ``None``: the model, or as ``resume`` says.

    Raises:
        FileNotFoundError: there is nothing to resume.
        SettingError: there is the record of another run.
    """
    record = run_dir / DATABASE
    if resume and not record.exists():
        raise FileNotFoundError(f"resume: {run_dir} holds no record of a run; start without resume")
    if not resume and checkpoint is None and holds_groups(record):
        raise SettingError(
            f"run_dir={run_dir} holds the record of an earlier run: go on with it (resume=True), or give another "
            "run_dir"
        )


def refusal(
    run_dir: str | os.PathLike[str], before: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str]
) -> str:
    """Why a run recorded with the values ``before`` is not gone on with ``now``; empty where it may be.

    Args:
        run_dir: The run.
        before: Values by key, of what was recorded.
        now: Values by key, of the run that is to go on; keys that only one of the two has differ.
        allow: Keys (or their sections, or keys inside them) that may differ.
    """
    differing = [key for key in {**before, **now} if before.get(key, _ABSENT) != now.get(key, _ABSENT)]
    refused = [key for key in differing if not any(_covers(allowed, key) for allowed in allow)]
    if not refused:
        return ""
    lines = [f"  {key}: was {_shown(before, key)}, now {_shown(now, key)}" for key in refused]
    return "\n".join(
        [
            f"resume: what the run in {os.fspath(run_dir)} has recorded would mean something else with these changes:",
            *lines,
            "leave them as they were, take a new run_dir, or accept the change with "
            f"resume_allow=[{','.join(refused)}]",
        ]
    )


def _shown(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key, _ABSENT)
    return "null" if value is None else str(value)


def _covers(allowed: str, key: str) -> bool:
    return key == allowed or key.startswith(f"{allowed}.") or allowed.startswith(f"{key}.")
