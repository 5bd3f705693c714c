"""RunEnd: why a run ended, and the exit code that says so."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

EXIT_FINISHED = 0
EXIT_ERROR = 1
"""An error, or something that would not stop in time."""
EXIT_CONFIG = 2
"""Refused before anything was started."""
EXIT_GUARD = 3
"""A guard stopped a run that could not get any better."""
EXIT_INTERRUPTED = 75
"""SIGINT or SIGTERM, and there is a record to go on from with ``resume`` (the code for "try again later")."""


class RunInterrupted(SystemExit):
    """A signal ended the run; raised by ``fit`` when everything is saved, so the script ends with that exit code."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Why a run ended, and the exit code that says so."""

    reason: str
    exit_code: int


def announce(end: RunEnd, run_dir: Path) -> None:
    """Say why a run ended early, and how to go on with it; nothing of one that finished."""
    if end.exit_code == EXIT_INTERRUPTED:
        log.warning(
            "%s; go on with resume=true run_dir=%s, in Python with AsyncRLTrainer(..., resume=True)",
            *(end.reason, run_dir),
        )
    elif end.exit_code != EXIT_FINISHED:
        log.error("the run was stopped: %s", end.reason)
